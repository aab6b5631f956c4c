"""Proof: all ranks of a region run one after the other in one process, and are compared with the unsplit region.

Compared are the outputs of the rows and every gradient: of the columns' inputs (summed over the ranks, as the copy
does), of sharded weights (each rank its part) and of what is not sharded (summed). Parameters are replaced by
randomised copies, so that zero-initialised biases and gains hide nothing, and everything runs in float64 where the
module's code lets it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_tp.dropout import without_dropout
from lightning_tp.plan.graph import tensors_in
from lightning_tp.plan.linears import feature_changes, weight_operand
from lightning_tp.plan.probe import Candidate, SplittableLinear
from lightning_tp.plan.sharding_plan import AttributeChange, SizeRule
from lightning_tp.plan.sizes import SIZED_FUNCTIONS, apply_rule, derive_rule, names_sizes, output_shape

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest relative difference of a proof. float64 runs agree to about 1e-15; the margin is for code that rounds to
float32 on the way, and three orders of magnitude below what a wrong split gives."""


class NotProven(Exception):
    """The ranks together do not give what the unsplit region gives."""


@dataclass
class Evidence:
    """What one run of a region has given.

    Attributes:
        outputs: For each row its output without bias; on one rank: its addend.
        full_outputs: For each row its output with bias (unsplit run only), detached.
        input_grads: Gradients of the columns' inputs, in the order of their first use.
        parameter_grads: Gradients of the module's parameters, by name; None where unused.
        leaks: Inputs of the module that enter the region past its columns.
        results: What the module returns; None for a tensor made from inside the region, which differs by nature.
        calls: Function, input shape and output shape of each call that names sizes (unsplit run).
        rules: The rules derived for those calls (rank run).
    """

    outputs: dict[str, Tensor]
    full_outputs: dict[str, Tensor]
    input_grads: list[Tensor | None]
    parameter_grads: dict[str, Tensor | None]
    leaks: list[str]
    results: list[Tensor | None]
    calls: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    rules: list[SizeRule]


class _RegionRun(TorchFunctionMode):
    """Cuts the columns' inputs, collects the rows' outputs, and rescales sizes if it is given the unsplit calls."""

    def __init__(
        self,
        columns: Mapping[int, SplittableLinear],
        rows: Mapping[int, SplittableLinear],
        full_outputs: Mapping[str, Tensor] | None,
        full_calls: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]] | None,
    ) -> None:
        super().__init__()
        self.columns, self.rows, self.full_outputs, self.full_calls = columns, rows, full_outputs, full_calls
        self.inputs: dict[int, tuple[Tensor, Tensor]] = {}
        self.outputs: dict[str, Tensor] = {}
        self.with_bias: dict[str, Tensor] = {}
        self.calls: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.rules: list[SizeRule] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs, _ = without_dropout(function, args, kwargs or {})
        with torch.enable_grad():
            if names_sizes(function, args):
                return self._sized(function, args, kwargs)
            operands = weight_operand(function, args, kwargs)
            weight = id(operands[1]) if operands is not None else 0
            if operands is not None and weight in self.columns:
                return self._column(function, args, kwargs, operands[0])
            if operands is not None and weight in self.rows:
                return self._row(function, args, kwargs, self.rows[weight], operands)
            return function(*args, **kwargs)

    def _sized(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(self.outputs) == len(self.rows):
            return function(*args, **kwargs)  # behind the region nothing is split
        if self.full_calls is None:
            result = function(*args, **kwargs)
            self.calls.append((SIZED_FUNCTIONS[function], tuple(args[0].shape), output_shape(result)))
            return result
        if len(self.rules) >= len(self.full_calls):
            return function(*args, **kwargs)
        name, full_input, full_output = self.full_calls[len(self.rules)]
        if name != SIZED_FUNCTIONS[function]:
            raise NotProven("its code takes another path on one rank's share")
        self.rules.append(derive_rule(function, full_input, full_output, args[0].shape))
        return apply_rule(function, args, kwargs, self.rules[-1])

    def _column(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> Any:
        if id(x) not in self.inputs:
            self.inputs[id(x)] = (x, x.detach().requires_grad_(True))
        leaf = self.inputs[id(x)][1]
        replaced = tuple(leaf if value is x else value for value in args)
        return function(*replaced, **{name: leaf if value is x else value for name, value in kwargs.items()})

    def _row(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], row: SplittableLinear, operands: Any
    ) -> Any:
        x, weight = operands
        self.outputs[row.name] = row.adapter.product(x, weight)
        if self.full_outputs is None:
            self.with_bias[row.name] = function(*args, **kwargs).detach()
        return self.with_bias[row.name] if self.full_outputs is None else self.full_outputs[row.name]


class RegionProof:
    """The unsplit run of one candidate, against which ways to run its ranks are checked."""

    def __init__(
        self,
        model: nn.Module,
        linears: Mapping[str, SplittableLinear],
        candidate: Candidate,
        size: int,
        run: Callable[[], Any],
    ) -> None:
        self.model, self.candidate, self.size = model, candidate, size
        self.module = model if candidate.call is None else candidate.call.module
        self.run = run
        self.columns = {column.module: linears[column.module] for column in candidate.columns}
        self.rows = {name: linears[name] for name in candidate.rows}
        self.names = {id(module): name for name, module in model.named_modules()}
        self.slots = [(m, key, p) for m in self.module.modules() for key, p in m._parameters.items() if p is not None]
        self.parameter_names = {id(p): name for name, p in model.named_parameters()}
        self.features = [feature_changes(model, candidate.columns, candidate.rows, rank) for rank in range(size)]
        self.dtype = torch.float64
        try:
            self.references = self._references()
        except (RuntimeError, TypeError, ValueError):
            self.dtype = torch.float32
            self.references = self._references()

    def relative(self, module: str) -> str:
        """The name of a module of the model within the proof's own module ("" is that module)."""
        root = self.names[id(self.module)]
        return module.removeprefix(root).removeprefix(".") if root else module

    def within(self, name: str) -> str:
        """The inverse of :meth:`relative`."""
        return ".".join(part for part in (self.names[id(self.module)], name) if part)

    def check(self, attributes: Sequence[AttributeChange], rescale: bool = False) -> tuple[float, tuple[SizeRule, ...]]:
        """Run all ranks with ``attributes`` (and rescaled sizes) and compare.

        Returns:
            The largest relative difference, and the rules for sizes (the same on every rank).

        Raises:
            NotProven: they differ, or the ranks need different rules.
            Exception: whatever the module's code raises when it runs on a share that does not fit.
        """
        worst, rules = 0.0, None
        for full, parameters, inputs in self.references:
            ranks = []
            for rank in range(self.size):
                ranks.append(self._execute(parameters, inputs, rank, attributes, full, rescale))
                if rules is not None and ranks[-1].rules != rules:
                    raise NotProven("its ranks or its inputs need different sizes")
                rules = ranks[-1].rules
            worst = max(worst, self._compare(full, ranks))
            if worst > TOLERANCE[self.dtype]:
                raise NotProven(f"its numbers differ by {worst:.1e}")
        return worst, tuple(rules or ())

    def _references(self) -> list[tuple[Evidence, dict[int, Tensor], tuple[Any, Any]]]:
        """The unsplit run on the inputs as captured, and with other values in the tensors that carry gradients."""
        references = []
        for seed in (0, 1):
            generator = torch.Generator().manual_seed(seed)
            parameters = {id(p): _randomised(p, self.dtype, generator) for _, _, p in self.slots}
            inputs = self._inputs(generator if seed else None)
            full = self._execute(parameters, inputs, None, (), None, False)
            references.append((full, parameters, inputs))
        return references

    def _inputs(self, generator: torch.Generator | None) -> tuple[Any, Any]:
        if self.candidate.call is None:
            return (), {}

        def prepared(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if not value.is_floating_point():
                return value.detach()
            leaf = value.detach().to(self.dtype)
            if generator is not None and value.requires_grad:
                noise = torch.randn(leaf.shape, dtype=self.dtype, generator=generator).to(leaf.device)
                leaf = leaf + noise * leaf.std().clamp(min=1e-3) if leaf.numel() > 1 else leaf + noise
            return leaf.requires_grad_(value.requires_grad)

        return tree_map(prepared, (self.candidate.call.args, self.candidate.call.kwargs))

    def _execute(
        self,
        parameters: Mapping[int, Tensor],
        inputs: tuple[Any, Any],
        rank: int | None,
        attributes: Sequence[AttributeChange],
        full: Evidence | None,
        rescale: bool,
    ) -> Evidence:
        """Run the module once, unsplit (``rank`` None) or as one rank, up to its last row, and back."""
        local = dict(parameters)
        if rank is not None:
            local.update(self._shares(parameters, rank))
        tensors = {key: nn.Parameter(value) for key, value in local.items()}
        of_weight = lambda linears: {id(tensors[id(linear.weight)]): linear for linear in linears.values()}  # noqa: E731
        mode = _RegionRun(
            of_weight(self.columns),
            of_weight(self.rows),
            None if full is None else full.full_outputs,
            full.calls if full is not None and rescale else None,
        )
        changes = [] if rank is None else [*self.features[rank], *attributes]
        args, kwargs = inputs
        with self._swapped(tensors), changed_attributes(self.model, changes), mode:
            returned = self.run() if self.candidate.call is None else self.module(*args, **kwargs)
        if len(mode.outputs) != len(self.rows):
            raise NotProven("its rows were not reached when its module ran by itself")
        leaves = [leaf for _, leaf in mode.inputs.values()]
        results = [] if self.candidate.call is None else self._results(returned, leaves)
        past = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        names = [(self.parameter_names[id(p)], tensors[id(p)]) for p in {id(p): p for _, _, p in self.slots}.values()]
        generator = torch.Generator().manual_seed(7)
        total = torch.zeros((), dtype=torch.float64, device=leaves[0].device)
        for row in self.rows:
            out = mode.outputs[row]
            total = total + (out * torch.randn(out.shape, dtype=out.dtype, generator=generator).to(out.device)).sum()
        targets = [*leaves, *past, *(tensor for _, tensor in names)]
        grads = torch.autograd.grad(total, targets, allow_unused=True)
        return Evidence(
            outputs={name: output.detach() for name, output in mode.outputs.items()},
            full_outputs=mode.with_bias,
            input_grads=list(grads[: len(leaves)]),
            leaks=[str(i) for i, grad in enumerate(grads[len(leaves) : len(leaves) + len(past)]) if grad is not None],
            parameter_grads=dict(zip((name for name, _ in names), grads[len(leaves) + len(past) :], strict=True)),
            results=results,
            calls=mode.calls,
            rules=mode.rules,
        )

    @staticmethod
    def _results(returned: Any, leaves: list[Tensor]) -> list[Tensor | None]:
        """The tensors that the module returns, without those that depend on its columns other than through its rows."""
        results: list[Tensor | None] = []
        for value in tensors_in(returned):
            inside = value.requires_grad and any(
                grad is not None
                for grad in torch.autograd.grad(value.sum(), leaves, retain_graph=True, allow_unused=True)
            )
            results.append(None if inside else value.detach())
        return results

    def _shares(self, parameters: Mapping[int, Tensor], rank: int) -> dict[int, Tensor]:
        shares: dict[int, Tensor] = {}
        for column in self.candidate.columns:
            linear = self.columns[column.module]
            index = torch.tensor(column.row_indices(rank), device=linear.weight.device)
            shares[id(linear.weight)] = parameters[id(linear.weight)].index_select(linear.adapter.output_dim, index)
            bias = linear.module._parameters.get("bias")
            if bias is not None:
                shares[id(bias)] = parameters[id(bias)].index_select(0, index)
        for linear in self.rows.values():
            whole = parameters[id(linear.weight)]
            shares[id(linear.weight)] = whole.chunk(self.size, linear.adapter.input_dim)[rank].clone()
        return shares

    def _compare(self, full: Evidence, ranks: list[Evidence]) -> float:
        """The largest relative difference between the unsplit evidence and that of all ranks together."""
        if full.leaks or any(rank.leaks for rank in ranks):
            raise NotProven("a tensor enters it past its columns")
        worst = 0.0
        for position, result in enumerate(full.results):
            if result is not None:
                for rank in ranks:
                    worst = max(worst, _difference(result.double(), [_as_double(rank.results, position)]))
        for name, output in full.outputs.items():
            worst = max(worst, _difference(output, [rank.outputs[name] for rank in ranks]))
        grads = [grad for grad in (*full.input_grads, *full.parameter_grads.values()) if grad is not None]
        # A gradient that is zero but for rounding (a key's bias under softmax) is compared with what rounding leaves.
        largest = max(float(grad.abs().max()) for grad in grads if grad.numel())
        floor = largest * 100 * torch.finfo(self.dtype).eps / TOLERANCE[self.dtype]
        for position, grad in enumerate(full.input_grads):
            worst = max(worst, _difference(grad, [rank.input_grads[position] for rank in ranks], floor))
        index = {}
        for column in self.candidate.columns:
            linear = self.columns[column.module]
            for key, dim in (("weight", linear.adapter.output_dim), ("bias", 0)):
                index[f"{column.module}.{key}" if column.module else key] = (dim, column)
        whole_rows = {f"{name}.weight": linear for name, linear in self.rows.items()}
        for name, grad in full.parameter_grads.items():
            per_rank = [rank.parameter_grads[name] for rank in ranks]
            if name in index and grad is not None:
                dim, column = index[name]
                per_rank = [_scattered(share, grad, dim, column.row_indices(r)) for r, share in enumerate(per_rank)]
            elif name in whole_rows and grad is not None:
                dim = whole_rows[name].adapter.input_dim
                if any(share is None for share in per_rank):
                    raise NotProven(f"{name} has no gradient on some rank")
                per_rank = [torch.cat([share for share in per_rank if share is not None], dim)]
            worst = max(worst, _difference(grad, per_rank, floor))
        return worst

    @contextmanager
    def _swapped(self, tensors: Mapping[int, nn.Parameter]) -> Iterator[None]:
        """The module runs on ``tensors`` and on buffers of the proof's dtype."""
        buffers = [(m, dict(m._buffers)) for m in self.module.modules()]
        for module, key, parameter in self.slots:
            module._parameters[key] = tensors[id(parameter)]
        for module, entries in buffers:
            for key, buffer in entries.items():
                if buffer is not None:
                    module._buffers[key] = buffer.to(self.dtype) if buffer.is_floating_point() else buffer.clone()
        try:
            yield
        finally:
            for module, key, parameter in self.slots:
                module._parameters[key] = parameter
            for module, entries in buffers:
                module._buffers.update(entries)


@contextmanager
def changed_attributes(model: nn.Module, changes: Sequence[AttributeChange]) -> Iterator[None]:
    """Set the attributes for the time of the context; configuration objects are copied, not changed."""
    saved: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for change in changes:
            attributes = vars(model.get_submodule(change.module))
            holder, _, field = change.attribute.rpartition(".")
            saved.append((attributes, holder or field, attributes[holder or field]))
            if holder:
                attributes[holder] = copy.copy(attributes[holder])
                vars(attributes[holder])[field] = change.value
            else:
                attributes[field] = change.value
        yield
    finally:
        for attributes, name, value in reversed(saved):
            attributes[name] = value


def _as_double(results: Sequence[Tensor | None], position: int) -> Tensor | None:
    result = results[position] if position < len(results) else None
    return None if result is None else result.double()


def _randomised(parameter: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    value = parameter.detach().to(dtype)
    scale = float(value.std()) if value.numel() > 1 else 0.0
    noise = torch.randn(value.shape, dtype=dtype, generator=generator).to(value.device)
    return value + noise * max(scale, 0.02)


def _scattered(share: Tensor | None, whole: Tensor, dim: int, index: list[int]) -> Tensor | None:
    if share is None:
        return None
    return torch.zeros_like(whole).index_add_(dim, torch.tensor(index, device=whole.device), share)


def _difference(expected: Tensor | None, parts: Sequence[Tensor | None], floor: float = 0.0) -> float:
    """``max|sum(parts) - expected|`` relative to ``max(max|expected|, floor)``.

    Infinite where shapes differ, only one side exists, or a number is not finite.
    """
    present = [part for part in parts if part is not None]
    if expected is None or not present:
        return 0.0 if expected is None and not present else float("inf")
    if any(part.shape != expected.shape for part in present):
        return float("inf")
    difference = (torch.stack(present).sum(0) - expected).abs().max()
    scale = expected.abs().max().clamp(min=floor)
    if not torch.isfinite(difference) or not torch.isfinite(scale):
        return float("inf")
    return float(difference / scale) if scale > 0 else float(difference)
