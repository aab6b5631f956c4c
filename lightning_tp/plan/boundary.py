"""Modules that multiply by parameters of their own: experts held in one tensor, attention of torch, code by hand.

Such a module ``M`` is split at its edges: its arguments are copied in, what it returns is summed. One of its
parameters, W, is cut into chunks along one dim. If what M returns is linear in W then the ranks' results, each with
its own chunk of W and zeros elsewhere, add up; and one backward pass with all but one chunk masked shows which part of
every other parameter that chunk needs. Every parameter and dim is tried as W; the way that splits most is proven.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_tp.dropout import DropoutOff
from lightning_tp.plan.compare import TOLERANCE, NotProven, difference, rounding_floor, scattered
from lightning_tp.plan.graph import copied_objects, tensors_in
from lightning_tp.plan.needs import index_sets, note, split_of
from lightning_tp.plan.sharding_plan import (
    AttributeChange,
    Boundary,
    Region,
    SplitParameter,
    ranges_of,
)
from lightning_tp.plan.stand_ins import changed_attributes, has_gradient, prepared_inputs, randomised, swapped
from lightning_tp.plan.state import random_state_kept
from lightning_tp.plan.trace import ModuleCall

LocalForward = Callable[..., Any]
"""``f(module, rank, size, *args, **kwargs)``: what a rank with its share of the parameters adds to the results."""

_MOST_PASSES = 4
"""Passes with other parameters and inputs, where activations hide what is needed."""


@dataclass(frozen=True)
class Cut:
    """One way to cut a module: parameters of which each rank has its part, and the others that it reads."""

    shards: tuple[SplitParameter, ...]
    partial: tuple[str, ...]
    once: tuple[str, ...]
    elements: int


class BoundarySplit:
    """The search for a split of one module at its edges.

    Args:
        model: The model.
        name: Name of the module.
        call: A call of it.
        size: Ranks.
        local_forward: What runs on a rank instead of the module's own forward.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        call: ModuleCall,
        size: int,
        local_forward: LocalForward | None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.model, self.name, self.call, self.size = model, name, call, size
        self.module = call.module
        self.local_forward = local_forward
        self.slots = [(m, key, p) for m in self.module.modules() for key, p in m._parameters.items() if p is not None]
        names = {id(p): parameter for parameter, p in model.named_parameters()}
        self.slots = [(m, key, p) for m, key, p in self.slots if has_gradient(p)]
        self.parameters = {names[id(p)]: p for _, _, p in self.slots}
        self.dtype = dtype
        try:
            self._run(*self._operands(0))
        except (RuntimeError, TypeError, ValueError):
            if dtype is not torch.float64:
                raise
            self.dtype = torch.float32
            self._run(*self._operands(0))

    def cuts(self, size: int) -> list[Cut]:
        """The ways to cut it for ``size`` ranks, the one that splits most first."""
        found = []
        for name, parameter in self.parameters.items():
            for dim in reversed(range(parameter.dim())) if parameter.dim() > 1 else ():
                if parameter.shape[dim] % size == 0:
                    cut = self._cut(name, dim, size)
                    if cut is not None and len(cut.shards) > 1:
                        found.append(cut)
        return sorted(found, key=lambda cut: -cut.elements)

    def region(self, attribute_trials: Iterator[tuple[AttributeChange, ...]]) -> Region:
        """The proven region.

        Raises:
            NotProven: no cut gives the same numbers; the message is of the one that splits most.
        """
        cuts = self.cuts(self.size)
        if not cuts:
            raise NotProven("no part of its parameters belongs to one rank alone")
        failure = ""
        trials = list(attribute_trials)
        for cut, attributes in itertools.product(cuts, trials):
            try:
                error, boundary = self.prove(cut, attributes)
                self._prove_in_own_dtype(cut, attributes, boundary)
            except NotProven as reason:
                failure = failure or str(reason)
                continue
            except Exception as reason:
                lines = str(reason).splitlines() or [""]
                failure = failure or f"{type(reason).__name__}: {lines[0]}"[:160]
                continue
            found_by = "adapter" if self.local_forward else "attributes" if attributes else "as is"
            return Region(
                module=self.name,
                columns=(),
                rows=(),
                inputs=(),
                partial=cut.partial,
                attributes=attributes,
                shards=cut.shards,
                boundary=boundary,
                random=self.call.random_calls > 0,
                found_by=found_by,
                error=error,
            )
        raise NotProven(f"one rank's share could not be proven equal: {failure}")

    def _prove_in_own_dtype(self, cut: Cut, attributes: Sequence[AttributeChange], boundary: Boundary) -> None:
        own = next(iter(self.parameters.values())).dtype
        if own is self.dtype or own not in TOLERANCE:
            return
        again = BoundarySplit(self.model, self.name, self.call, self.size, self.local_forward, own)
        if again.prove(cut, attributes)[1] != boundary:
            raise NotProven(f"its code takes another path in {str(own).removeprefix('torch.')}")

    def legal_sizes(self, limit: int = 64) -> tuple[int, ...]:
        """The sizes for which there is a cut of as many parameters as the best one has at the smallest size."""
        legal: list[int] = [1]
        most = 0
        dims = {size for parameter in self.parameters.values() for size in parameter.shape}
        tried: list[int] = []
        for size in range(2, min(max(dims, default=1), limit) + 1):
            # What a size's divisor cannot split it cannot either.
            divisors = [divisor for divisor in tried if size % divisor == 0]
            if any(dim % size == 0 for dim in dims) and all(divisor in legal for divisor in divisors):
                tried.append(size)
                cuts = self.cuts(size)
                if cuts and cuts[0].elements >= most:
                    most = max(most, cuts[0].elements)
                    legal.append(size)
        return tuple(legal)

    def _operands(self, seed: int) -> tuple[dict[str, Tensor], tuple[Any, Any]]:
        generator = torch.Generator().manual_seed(seed)
        parameters = {name: randomised(p, self.dtype, generator) for name, p in self.parameters.items()}
        return parameters, prepared_inputs(self.call, self.dtype, generator if seed else None)

    def _run(
        self,
        values: Mapping[str, Tensor],
        inputs: tuple[Any, Any],
        rank: int | None = None,
        attributes: Sequence[AttributeChange] = (),
    ) -> tuple[list[Tensor], Any]:
        """What the module returns, unsplit or on one rank: its floating tensors, and all of it."""
        tensors = {id(self.parameters[name]): value for name, value in values.items()}
        args, kwargs = copied_objects(inputs)
        with (
            random_state_kept(),
            swapped(self.module, self.slots, tensors, self.dtype),
            changed_attributes(self.model, attributes),
            torch.enable_grad(),
            DropoutOff(),
        ):
            if rank is None or self.local_forward is None:
                returned = self.module(*args, **kwargs)
            else:
                returned = self.local_forward(self.module, rank, self.size, *args, **kwargs)
        outputs = [value for value in tensors_in(returned) if value.is_floating_point()]
        if not outputs:
            raise NotProven("it returns no tensor")
        return outputs, returned

    def _cut(self, row: str, dim: int, size: int) -> Cut | None:
        """The cut that follows from chunks of the parameter ``row`` along ``dim``."""
        sets = {name: index_sets(p.shape, size) for name, p in self.parameters.items()}
        beside = set(self.parameters)
        for seed in range(_MOST_PASSES):
            parameters, inputs = self._operands(seed)
            leaves = {name: value.requires_grad_(True) for name, value in parameters.items()}
            totals = []
            for rank in range(-1, size):
                mask = torch.zeros_like(leaves[row])
                if rank >= 0:
                    share = mask.shape[dim] // size
                    mask.narrow(dim, rank * share, share).fill_(1)
                outputs, _ = self._run({**leaves, row: leaves[row] * mask}, inputs)
                outputs = [output for output in outputs if _depends(output, leaves[row])]
                if not outputs:
                    return None
                totals.append(_projection(outputs))
                found = torch.autograd.grad(totals[-1], list(leaves.values()), allow_unused=True)
                grads = dict(zip(leaves, found, strict=True))
                if rank < 0:
                    # Without the row only what is added beside it is left.
                    beside &= {name for name, grad in grads.items() if grad is not None and bool(grad.any())} - {row}
                    continue
                for name, grad in grads.items():
                    note(sets[name], rank, grad)
            if not seed and not self._is_linear_in(row, leaves, inputs, totals):
                return None
            others = [name for name in sets if name != row and name not in beside]
            if all(any(bool(s.any(0).all()) for s in sets[name]) for name in others):
                break
            if not any(_disjoint(s) for name in others for s in sets[name]):
                return None
        shards = [SplitParameter(_chunks(self.parameters[row].shape[dim], size), row, dim)]
        partial = []
        for name, dims in sets.items():
            if name == row or name in beside or not any(bool(s.any()) for s in dims):
                continue
            splits = [(d, split_of(s)) for d, s in enumerate(dims)]
            shard = next((SplitParameter(rows, name, d) for d, rows in splits if rows is not None), None)
            if shard is None:
                partial.append(name)
            else:
                shards.append(shard)
        elements = sum(self.parameters[shard.parameter].numel() for shard in shards)
        return Cut(tuple(shards), tuple(partial) + tuple(sorted(beside)), tuple(sorted(beside)), elements)

    def _is_linear_in(
        self, row: str, leaves: Mapping[str, Tensor], inputs: tuple[Any, Any], totals: list[Tensor]
    ) -> bool:
        """Whether the results with one chunk each add up to those with the whole row (the first are without it)."""
        outputs, _ = self._run(leaves, inputs)
        whole = _projection([output for output in outputs if _depends(output, leaves[row])])
        chunks = torch.stack(totals[1:]).sum() - (len(totals) - 2) * totals[0]
        scale = torch.stack(totals).abs().max() + whole.abs()
        return bool((whole - chunks).abs() <= TOLERANCE[self.dtype] * scale)

    def prove(self, cut: Cut, attributes: Sequence[AttributeChange]) -> tuple[float, Boundary]:
        """Run all ranks cut like this and compare: the largest relative difference, and what the edges look like.

        Raises:
            NotProven: they give other numbers.
        """
        worst = 0.0
        for seed in (0, 1):
            parameters, inputs = self._operands(seed)
            leaves = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.requires_grad]
            leaves = list({id(leaf): leaf for leaf in leaves}.values())
            whole = {name: value.requires_grad_(True) for name, value in parameters.items()}
            outputs, returned = self._run(whole, inputs)
            others = [value for value in tensors_in(returned) if not value.is_floating_point()]
            grads = torch.autograd.grad(_projection(outputs), [*leaves, *whole.values()], allow_unused=True)
            by_rank: list[list[Tensor | None]] = []
            sums = [torch.zeros_like(output) for output in outputs]
            for rank in range(self.size):
                shares = self._shares(cut, parameters, rank)
                read = {n: v * (rank == 0) if n in cut.once else v for n, v in shares.items()}
                local, local_returned = self._run(read, inputs, rank, attributes)
                if [x.shape for x in local] != [x.shape for x in outputs]:
                    raise NotProven("what it returns has another shape on one rank")
                same = [value for value in tensors_in(local_returned) if not value.is_floating_point()]
                if len(same) != len(others) or not all(map(torch.equal, same, others)):
                    raise NotProven("what it returns differs between the ranks")
                sums = [total + output.detach() for total, output in zip(sums, local, strict=True)]
                targets = [*leaves, *shares.values()]
                by_rank.append(list(torch.autograd.grad(_projection(local), targets, allow_unused=True)))
            worst = max(worst, *(difference(o.detach(), [s]) for o, s in zip(outputs, sums, strict=True)))
            floor = rounding_floor(grads, self.dtype)
            split = {shard.parameter: shard for shard in cut.shards}
            names = list(whole)
            for position, expected in enumerate(grads):
                parts = [rank_grads[position] for rank_grads in by_rank]
                shard = split.get(names[position - len(leaves)]) if position >= len(leaves) else None
                if shard is not None and expected is not None:
                    parts = [scattered(g, expected, shard.dim, shard.row_indices(r)) for r, g in enumerate(parts)]
                summed = position < len(leaves) or shard is not None or names[position - len(leaves)] in cut.partial
                if summed or expected is None or not bool(expected.any()):
                    worst = max(worst, difference(expected, parts, floor))
                else:
                    worst = max(worst, *(difference(expected, [part], floor) for part in parts))
            if worst > TOLERANCE[self.dtype]:
                raise NotProven(f"its numbers differ by {worst:.1e}")
        return worst, Boundary(len(leaves), len(outputs), cut.once)

    def _shares(self, cut: Cut, parameters: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        shares = {name: value.detach() for name, value in parameters.items()}
        for shard in cut.shards:
            index = torch.tensor(shard.row_indices(rank), device=shares[shard.parameter].device)
            shares[shard.parameter] = shares[shard.parameter].index_select(shard.dim, index)
        return {name: value.clone().requires_grad_(True) for name, value in shares.items()}


def _disjoint(sets: Tensor) -> bool:
    """Whether no index of ``sets [ranks, size]`` is needed by two ranks, and some are needed."""
    return bool((sets.sum(0) <= 1).all()) and bool(sets.any())


def _depends(output: Tensor, leaf: Tensor) -> bool:
    if not output.requires_grad:
        return False
    (grad,) = torch.autograd.grad(output.sum(), [leaf], retain_graph=True, allow_unused=True)
    return grad is not None


def _chunks(features: int, size: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    share = features // size
    return tuple(ranges_of(range(rank * share, (rank + 1) * share)) for rank in range(size))


def _projection(outputs: Sequence[Tensor]) -> Tensor:
    """A fixed random sum over all outputs."""
    generator = torch.Generator().manual_seed(11)
    total = torch.zeros((), dtype=torch.float64, device=outputs[0].device)
    for output in outputs:
        weights = torch.randn(output.shape, dtype=torch.float64, generator=generator).to(output.device)
        total = total + (output.double() * weights).sum()
    return total
