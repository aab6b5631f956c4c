"""Watching a model run: which linear is called on which tensor, inside which module, with randomness switched off."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from lightning_tp.dropout import without_dropout
from lightning_tp.plan.graph import copied_objects
from lightning_tp.plan.linears import PRODUCTS, TRANSPOSES, SplittableLinear, weight_operand
from lightning_tp.plan.record import Record
from lightning_tp.plan.state import random_state_kept

_OBSERVERS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__,
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__, Tensor.__format__,
    torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, torch.is_nonzero, Tensor.is_nonzero,
}  # fmt: skip
_ABOUT_VALUES = {"dtype", "device", "requires_grad", "is_cuda", "is_meta", "layout", "grad", "_backward_hooks"}
"""Properties of a tensor that are those of its parts."""
_BACKWARDS = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


@dataclass
class ModuleCall:
    """One call of a module's forward: its arguments, for running it again."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_calls: int = 0
    """Dropouts within it (while it runs: before it)."""
    given: Any = None
    """Its arguments as the run's record describes them."""
    operations: range = range(0)
    """Its part of the run's record."""


@dataclass
class LinearCall:
    """One product with a weight of the model.

    Attributes:
        owner: The module that holds the weight, if its own forward made the call, else None.
        weight: The weight as it is known in the model.
        x: The input ``[..., in]``, attached to the graph that leads back to earlier cuts.
        y: The output ``[..., out]``, cut: a leaf of the graph.
        stack: The module calls around it, outermost first, without the linear's own.
        random_before: Dropouts that the run had met when this call came.
    """

    owner: str | None
    weight: nn.Parameter
    x: Tensor
    y: Tensor
    stack: tuple[ModuleCall, ...]
    random_before: int
    operation: int
    """Its place in the run's record."""


@dataclass
class Run:
    """What a traced run has shown."""

    record: Record = field(default_factory=Record)
    calls: list[LinearCall] = field(default_factory=list)
    module_calls: dict[str, list[ModuleCall]] = field(default_factory=dict)
    users: dict[int, set[str]] = field(default_factory=dict)
    """By id of each parameter that something is multiplied by: the innermost modules that did it."""
    readers: dict[int, set[str]] = field(default_factory=dict)
    """By id of each parameter: the innermost modules that have read it, or its shape."""
    foreign_uses: set[int] = field(default_factory=set)
    """ids of the weights and biases that something else than their own linear reads."""
    transformed: set[int] = field(default_factory=set)
    """ids of the weights that are multiplied by inside a function transform (vmap, grad)."""
    random_calls: int = 0
    norm_inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    """Name and input of each normalisation that passed its input on element by element."""
    observed: list[Tensor] = field(default_factory=list)
    """Tensors that became numbers of Python, to be compared or logged: they have left the computation."""
    differentiated: list[Tensor] = field(default_factory=list)
    """Tensors of which the model itself took gradients."""
    outermost: list[Any] = field(default_factory=list)
    """What the outermost module calls have returned."""
    outputs: Any = None
    _kinds: dict[Any, int] = field(default_factory=dict)
    _kind_of_call: dict[int, int] = field(default_factory=dict)

    def kind(self, call: ModuleCall) -> int:
        """A number that calls have in common which compute the same: those of repeated blocks."""
        if id(call) not in self._kind_of_call:
            names = {id(p): name for name, p in call.module.named_parameters(remove_duplicate=False)}
            classes = tuple((name, type(module)) for name, module in call.module.named_modules())
            computed = self.record.computation(call.operations, call.given, names)
            self._kind_of_call[id(call)] = self._kinds.setdefault((classes, computed), len(self._kinds))
        return self._kind_of_call[id(call)]


class LinearTrace(TorchFunctionMode):
    """Records a run, and cuts the autograd graph at the output of every linear.

    The cut outputs are random numbers of unit scale, so that what the later computation depends on shows in its
    gradients whatever the weights are (zero-initialised projections and gates included). Gradients are recorded even
    where the model switches them off, and ``detach`` passes them, since a value that is used without a gradient is
    used all the same.
    """

    def __init__(self, linears: Mapping[str, SplittableLinear], seed: int = 0) -> None:
        super().__init__()
        self.run = Run()
        self.stack: list[ModuleCall] = []
        self._linears = {id(linear.weight): linear for linear in linears.values()}
        biases = [linear.module._parameters.get("bias") for linear in linears.values()]
        self._biases = {id(bias) for bias in biases if bias is not None}
        self._sources: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seed = seed

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in ("__get__", "__set__"):
            return self._attribute(function, args, kwargs)
        args, kwargs, probability = without_dropout(function, args, kwargs)
        self.run.random_calls += probability > 0
        tensors = _tensors((*args, *kwargs.values()))
        operands = weight_operand(function, args, kwargs)
        linear = self._linears.get(id(operands[1])) if operands is not None else None
        if operands is None or linear is None or linear.adapter.output_dim != operands[2]:
            linear = None
        elif is_functorch_wrapped_tensor(operands[0]):
            self.run.transformed.add(id(linear.weight))
            linear = None
        own = {id(parameter) for parameter in linear.module._parameters.values()} if linear is not None else set()
        for tensor in tensors:
            source = tensor if isinstance(tensor, nn.Parameter) else tensor._base
            self._read(source)
            if id(source) in self._linears and id(source) not in own and function not in TRANSPOSES:
                self.run.foreign_uses.add(id(source))
            if id(source) in self._biases and id(source) not in own and not self._is_of_caller(source):
                self.run.foreign_uses.add(id(source))
            if function in PRODUCTS and isinstance(source, nn.Parameter) and self.stack:
                self.run.users.setdefault(id(source), set()).add(self.stack[-1].name)
        if function in _OBSERVERS or kwargs.get("out") is not None:
            self._observe(tensors)
        with torch.enable_grad():
            if function in _BACKWARDS:
                result = self._differentiate(function, *args, **kwargs)
            elif kwargs.get("out") is not None:
                with torch.no_grad():  # such a call has no gradient
                    result = function(*args, **kwargs)
            elif function is Tensor.detach:
                result = args[0].view_as(args[0])
            elif operands is None or linear is None:
                result = function(*args, **kwargs)
            else:
                result = self._cut(linear, operands[0])
        self.run.record.add(function, args, kwargs, result)
        self._note_sources(result, tensors)
        return result

    def _read(self, source: Any) -> None:
        if isinstance(source, nn.Parameter):
            self.run.readers.setdefault(id(source), set()).add(self.stack[-1].name if self.stack else "")

    def _attribute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        tensor = args[0]
        if getattr(function.__self__, "__name__", "") not in _ABOUT_VALUES:
            self._read(tensor)
        if id(tensor) in self._linears or id(tensor) in self._biases:
            elsewhere = function.__self__ is Tensor.shape and not self._is_of_caller(tensor)
            if elsewhere or (isinstance(result, Tensor) and result._base is not tensor):  # .data
                self.run.foreign_uses.add(id(tensor))
        if isinstance(result, Tensor):
            self.run.record.add(function, args, kwargs, result)
            self._note_sources(result, [tensor])
        return result

    def _is_of_caller(self, parameter: Any) -> bool:
        """Whether the module that runs holds ``parameter``."""
        return bool(self.stack) and any(p is parameter for p in self.stack[-1].module._parameters.values())

    def _note_sources(self, result: Any, tensors: list[Tensor]) -> None:
        """Remember what a result that no graph leads back from was computed from: a comparison, an index, ``.data``."""
        for tensor in _tensors((result,)):
            if not tensor.requires_grad:
                sources = {id(source): source for argument in tensors for source in self._live(argument)}
                if sources:
                    self._sources[id(tensor)] = (tensor, list(sources.values()))

    def _live(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] if tensor.requires_grad else self._sources.get(id(tensor), (tensor, []))[1]

    def _observe(self, tensors: list[Tensor]) -> None:
        self.run.observed += [source for tensor in tensors for source in (tensor, *self._live(tensor))]

    def _differentiate(self, function: Any, outputs: Any, inputs: Any = (), *args: Any, **kwargs: Any) -> Any:
        """What stands for gradients that the model takes itself, which would end at the cuts."""
        outputs = _tensors((outputs,))
        self.run.differentiated += outputs
        if function is not torch.autograd.grad:
            return None
        total = sum(output.sum() for output in outputs)
        return tuple(torch.randn_like(tensor) + 0 * total for tensor in _tensors((inputs,)))

    def _cut(self, linear: SplittableLinear, x: Tensor) -> Tensor:
        """What stands for the output of ``linear``, which is not computed."""
        weight = linear.weight
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        if x.shape[-1:] != (linear.input_features,) or (not autocast and x.dtype != weight.dtype):
            linear.adapter.product(x, weight)
            raise RuntimeError(f"{linear.name} does not fit its input")  # the line above tells it better
        caller = self.stack[-1] if self.stack else None
        is_own = caller is not None and caller.module._parameters.get("weight") is weight
        shape = (*x.shape[:-1], linear.output_features)
        generator = self._generator(x.device)
        y = torch.randn(shape, dtype=dtype, device=x.device, generator=generator).requires_grad_(True)
        self.run.calls.append(
            LinearCall(
                owner=caller.name if is_own and caller is not None else None,
                weight=weight,
                x=x,
                y=y,
                stack=tuple(self.stack[:-1] if is_own else self.stack),
                random_before=self.run.random_calls,
                operation=len(self.run.record),
            )
        )
        return y.clone()

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors in arguments or a result, and in lists and tuples among them."""
    entries = (entry for value in values for entry in (value if isinstance(value, (list, tuple)) else (value,)))
    return [entry for entry in entries if isinstance(entry, Tensor)]


@contextmanager
def module_calls(model: nn.Module, trace: LinearTrace) -> Iterator[None]:
    """Keep the stack of ``trace`` equal to the module calls that are running, and record them all."""
    handles = []
    stack, run = trace.stack, trace.run
    for name, module in model.named_modules():

        def enter(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            # As the module is given them: a cache is filled while it runs.
            given, named = copied_objects((args, kwargs))
            described, start = run.record.described((args, kwargs)), len(run.record)
            stack.append(ModuleCall(name, module, given, named, run.random_calls, described, range(start, start)))
            run.module_calls.setdefault(name, []).append(stack[-1])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            call = stack.pop()
            call.random_calls = run.random_calls - call.random_calls
            call.operations = range(call.operations.start, len(run.record))
            if not stack:
                run.outermost.append(output)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        stack.clear()


def traced_run(model: nn.Module, linears: Mapping[str, SplittableLinear], run: Callable[[], Any], seed: int = 0) -> Run:
    """Run ``model`` through ``run`` and record it. Each run draws the same random numbers, and takes the same path."""
    trace = LinearTrace(linears, seed)
    with random_state_kept(), module_calls(model, trace), trace:
        trace.run.outputs = run()
    return trace.run


def attribute_names(module: nn.Module) -> set[str]:
    """The attribute names that the methods of ``module``'s class mention."""
    names: set[str] = set()
    for _, method in inspect.getmembers(type(module), inspect.isfunction):
        if not method.__module__.startswith("torch.nn.modules.module"):
            names.update(method.__code__.co_names)
    return names
