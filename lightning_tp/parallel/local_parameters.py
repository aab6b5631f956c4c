"""Modules whose parameters are DTensors, and whose code reads them as local tensors.

Outside a step ``module.weight`` is the DTensor parameter itself; while a step or a forward runs it is the tensor that
this rank computes with, attached to the graph of the DTensor. This is a property on a subclass that is made once for
each class of modules (the idea of torchtitan's simple FSDP), so it also serves code that reads another module's weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import register_sharding

from lightning_tp.parallel.collectives import copy_parameter
from lightning_tp.parallel.local_read import local_read
from lightning_tp.parallel.scope import Entered, Scope
from lightning_tp.plan.sharding_plan import ShardingPlan


@register_sharding(torch.ops.aten._is_any_true.default)
def _is_any_true_on_whole_tensors(x: Tensor) -> list[tuple[list[Any], list[Any]]]:
    """Autograd's anomaly detection asks this of every gradient, and torch has no rule for it on DTensors."""
    return [([Replicate()], [Replicate()])]


@dataclass(frozen=True)
class LocalRead:
    """How one rank reads a parameter.

    Attributes:
        partial: Whether gradients of this rank are a partial sum, to be all-reduced over ``group``.
        rows: The rows that this rank takes of a parameter that it holds whole: ``(dim, indices)``; None takes all.
        counts: Whether this rank counts it; if not it reads zeros.
    """

    group: dist.ProcessGroup
    partial: bool = False
    rows: tuple[int, Tensor] | None = None
    counts: bool = True

    def __call__(self, parameter: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
            return self._read(parameter)
        with temporarily_clear_interpreter_stack():  # function transforms (vmap, grad) know no DTensors
            return self._read(parameter)

    def _read(self, parameter: Tensor) -> Tensor:
        local = local_read(parameter)
        if self.partial:
            local = copy_parameter(local, self.group)
        if not self.counts:
            local = local * 0.0
        return local if self.rows is None else local.index_select(*self.rows)


@dataclass(frozen=True)
class LocalAttributes:
    """Attributes that have another value while their region runs."""

    scope: Scope
    values: Mapping[str, Any]


@dataclass
class ParallelState:
    """What a rewritten module knows of its part in the plan. Copies of the module share it.

    Attributes:
        scope: The step of the whole model.
        reads: How each of the module's own parameters is read.
        attributes: The attributes that regions change.
        role: What the module is in its region: a column, a row, a normalisation, ...
        entry: For a linear whose output enters a region of which it is no column: which features, in which group.
        region: The context of the regions that the module's forward holds.
        plan: The plan in force (root module only).
        mesh_sizes: Sizes of the data-parallel and the tensor-parallel axis (root module only).
    """

    scope: Scope
    reads: dict[str, LocalRead] = field(default_factory=dict)
    attributes: list[LocalAttributes] = field(default_factory=list)
    role: Any = None
    entry: Any = None
    region: Any = None
    plan: ShardingPlan | None = None
    mesh_sizes: tuple[int, int] = (1, 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelState:
        return self


class ParallelModule(nn.Module):
    """Base of the generated classes; ``_parallel`` is the module's :class:`ParallelState`."""

    _parallel: ParallelState

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._parallel.scope.active:
            return super().__call__(*args, **kwargs)
        with Entered(self._parallel.scope):
            return super().__call__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copying keeps the class; pickling would have to find a class that exists only in this process.
        if protocol == 4 or not isinstance(protocol, int):
            return super().__reduce_ex__(protocol)
        raise TypeError(
            f"A tensor-parallel {type(self).__name__} cannot be pickled. Save its state_dict() or use the Trainer's "
            "checkpoints."
        )


def parallel_state(module: nn.Module) -> ParallelState | None:
    """The state of a rewritten module, None for any other."""
    return vars(module).get("_parallel")


def rewrite(module: nn.Module, state: ParallelState, mixins: tuple[type, ...] = ()) -> None:
    """Make ``module`` read its parameters and attributes through ``state``."""
    names = tuple(sorted(state.reads))
    changed = tuple(sorted({name for attributes in state.attributes for name in attributes.values}))
    module.__dict__["_parallel"] = state
    base: Any = type(module)
    if mixins and "forward" in vars(module):
        base = _class_with(base, vars(module).pop("forward"))
    module.__class__ = _parallel_class(base, mixins, names, changed)


def _class_with(base: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """A subclass of ``base`` that runs ``forward``, which one instance had in place of its class's."""

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    functools.update_wrapper(run, forward)
    return type(base.__name__, (base,), {"__module__": base.__module__, "forward": run})


@functools.cache
def _parallel_class(
    base: type[nn.Module], mixins: tuple[type, ...], parameters: tuple[str, ...], attributes: tuple[str, ...]
) -> type[nn.Module]:
    members: dict[str, Any] = {"__module__": base.__module__, "__qualname__": f"Parallel{base.__qualname__}"}
    members |= {name: _parameter_property(name) for name in parameters}
    members |= {name: _attribute_property(name) for name in attributes}
    if issubclass(base, nn.RNNBase):
        # It keeps a second list of its weights, and packs them: here they are read one by one.
        members["_flat_weights"] = property(
            lambda self: [getattr(self, name) for name in self._flat_weights_names], lambda self, weights: None
        )
        members["flatten_parameters"] = lambda self: None
    return type(f"Parallel{base.__name__}", (*mixins, ParallelModule, base), members)


def _parameter_property(name: str) -> property:
    def read(self: ParallelModule) -> Any:
        parameter = self._parameters[name]
        state = self._parallel
        if parameter is None or not (state.scope.active or _running()) or _is_sharded_over_data(parameter):
            return parameter
        return state.reads[name](parameter)

    return property(read)


def _running() -> bool:
    """Whether the model runs though no call says so: traced by torch.compile, or recomputed in the backward pass."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1


def _is_sharded_over_data(parameter: Tensor) -> bool:
    """Whether FSDP holds the parameter at this moment as a shard, on a mesh with its own axis."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1


def _attribute_property(name: str) -> property:
    def read(self: ParallelModule) -> Any:
        for attributes in self._parallel.attributes:
            if attributes.scope.active and name in attributes.values:
                return attributes.values[name]
        return self.__dict__[name]

    def write(self: ParallelModule, value: Any) -> None:
        self.__dict__[name] = value

    return property(read, write)


def local_tensor(parameter: Tensor) -> Tensor:
    """The part of ``parameter`` that this rank holds, outside of autograd."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else torch.Tensor.detach(parameter)
