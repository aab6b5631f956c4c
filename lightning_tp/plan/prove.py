"""Proof: all ranks of a region run one after the other in one process, and are compared with the unsplit region.

Compared are the outputs of the rows and every gradient: of the columns' inputs (summed over the ranks, as the copy
does), of sharded weights (each rank its part) and of what is not sharded (summed). Parameters are replaced by
randomised copies, so that zero-initialised biases and gains hide nothing, and everything runs in float64 where the
module's code lets it, and what is proven so runs once more in the dtype of the model's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_tp.plan.arguments import argument_name, named_arguments, positional_names, sliced_arguments
from lightning_tp.plan.candidate import Candidate, Probe
from lightning_tp.plan.compare import TOLERANCE, NotProven, difference, rounding_floor, scattered
from lightning_tp.plan.graph import copied_objects, tensors_in
from lightning_tp.plan.linears import feature_changes
from lightning_tp.plan.needs import index_sets, note, split_of
from lightning_tp.plan.norms import recognised_norm
from lightning_tp.plan.region_run import RegionRun
from lightning_tp.plan.sharding_plan import ArgumentSlice, AttributeChange, Ranges, SizeRule, Split
from lightning_tp.plan.stand_ins import changed_attributes, has_gradient, prepared_inputs, randomised, swapped
from lightning_tp.plan.state import random_state_kept
from lightning_tp.plan.thin import ThinWeight

_Values = Mapping[int, Tensor | ThinWeight]
"""By id of each parameter: what stands for it."""
_OUT, _INTO = " (out)", " (in)"
"""Names of the two factors of a thin weight end so."""
_DRAWS = " (its code draws random numbers, which differ on a share)"


@dataclass
class Evidence:
    """What one run of a region has given.

    Attributes:
        outputs: For each call of a row its output without bias; on one rank: its addend.
        full_outputs: For each call of a row its output with bias (unsplit run only), detached.
        input_grads: Gradients of what enters the region: the columns' inputs in the order of their first use, then the
            entries, then the sliced arguments.
        parameter_grads: Gradients of the module's parameters, by name; None where unused.
        leaks: Inputs of the module that enter the region past its columns.
        results: What the module returns; None for a tensor made from inside the region, which differs by nature.
        statistics: Sums of the normalisations, by the number of their call; on one rank: its addends.
        calls: Function, input shape and output shape of each call that names sizes (unsplit run).
        rules: The rules derived for those calls (rank run).
        local_norms: The normalisations that ran on split features (rank run).
    """

    outputs: dict[str, Tensor]
    full_outputs: dict[str, Tensor]
    input_grads: list[Tensor | None]
    parameter_grads: dict[str, Tensor | None]
    leaks: list[str]
    results: list[Tensor | None]
    statistics: dict[int, Tensor]
    calls: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    rules: list[SizeRule]
    local_norms: set[str]


@dataclass
class _Pass:
    """A forward run of the region, before its gradients are taken."""

    run: RegionRun
    total: Tensor
    inputs: list[Tensor]
    past: list[Tensor]
    parameters: dict[str, Tensor]
    results: list[Tensor | None]


class RegionProof:
    """The unsplit run of one candidate, against which ways to run its ranks are checked."""

    def __init__(
        self,
        model: nn.Module,
        found: Probe,
        candidate: Candidate,
        size: int,
        run: Callable[[], Any],
        dtype: torch.dtype = torch.float64,
        arguments: tuple[ArgumentSlice, ...] = (),
    ) -> None:
        self.model, self.candidate, self.size = model, candidate, size
        linears = found.linears
        self._found = found
        self._in_own_dtype: RegionProof | None = None
        self.module = model if candidate.call is None else candidate.call.module
        self.run = run
        self.columns = {column.module: linears[column.module] for column in candidate.columns}
        self.rows = {name: linears[name] for name in candidate.rows}
        self.entries = {id(linears[entry.module].weight): entry for entry in candidate.entries}
        self.norms = {name: recognised_norm(model.get_submodule(name)) for name in candidate.norms}
        self.names = {id(module): name for name, module in model.named_modules()}
        self.slots = [(m, key, p) for m in self.module.modules() for key, p in m._parameters.items() if p is not None]
        self.parameter_names = {id(p): name for name, p in model.named_parameters()}
        self.ids = {name: key for key, name in self.parameter_names.items()}
        here = {id(p) for _, _, p in self.slots}
        self.thin = {
            id(linear.weight): linear
            for linear in linears.values()
            if id(linear.weight) in here and id(linear.weight) not in found.run.foreign_uses
        }
        self.features = [feature_changes(model, candidate.columns, candidate.rows, rank) for rank in range(size)]
        # One that belongs to another module comes in as an argument.
        self.shards = [shard for shard in candidate.shards if self.ids[shard.parameter] in here]
        self.arguments = arguments
        self.draws = False
        self.dtype = dtype
        try:
            self.references = self._references()
        except (RuntimeError, TypeError, ValueError):
            if dtype is not torch.float64:
                raise
            self.dtype = torch.float32
            self.references = self._references()

    def relative(self, module: str) -> str:
        """The name of a module of the model within the proof's own module ("" is that module)."""
        root = self.names[id(self.module)]
        return module.removeprefix(root).removeprefix(".") if root else module

    def within(self, name: str) -> str:
        """The inverse of :meth:`relative`."""
        return ".".join(part for part in (self.names[id(self.module)], name) if part)

    def slice_arguments(self) -> None:
        """Cut those arguments of the module of which each rank needs its own part (a bias for each head)."""
        if self.candidate.call is None:
            return
        _, parameters, (args, kwargs) = self.references[0]
        named = {str(position): value for position, value in enumerate(args)} | dict(kwargs)
        leaves = {name: value.detach().requires_grad_(True) for name, value in named.items() if _is_float(value)}
        if not leaves:
            return
        changed = tuple(leaves.get(str(i), value) for i, value in enumerate(args))
        passed = self._forward(parameters, (changed, {**kwargs, **{k: v for k, v in leaves.items() if k in kwargs}}))
        sets = {name: index_sets(leaf.shape, self.size) for name, leaf in leaves.items()}
        for rank in range(self.size):
            total = torch.zeros((), dtype=torch.float64)
            for x in passed.run.row_inputs:
                share = x.chunk(self.size, -1)[rank]
                total = total + (share * torch.randn(share.shape, dtype=share.dtype)).sum().double()
            if not total.requires_grad:
                return  # the model detaches it
            grads = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
            for name, grad in zip(leaves, grads, strict=True):
                note(sets[name], rank, grad)
        found = []
        for name, dims in sets.items():
            for dim, indices in enumerate(dims):
                period, rows = _periodic_split(indices)
                if rows is not None:
                    found.append(ArgumentSlice(argument_name(self.module, name), dim, period, rows))
                    break
        if found:
            self.arguments = tuple(found)
            self.references = self._references()

    def prove(self, attributes: Sequence[AttributeChange], rescale: bool = False) -> Verdict:
        """:meth:`check`, and the same again in the dtype of the model's own parameters.

        Raises: as :meth:`check`.
        """
        verdict = self.check(attributes, rescale)
        own = next(iter(self.columns.values())).weight.dtype
        if own is not self.dtype and own in TOLERANCE:
            if self._in_own_dtype is None:
                self._in_own_dtype = RegionProof(
                    self.model, self._found, self.candidate, self.size, self.run, own, self.arguments
                )
            again = self._in_own_dtype.check(attributes, rescale)
            if (again.rules, again.norms) != (verdict.rules, verdict.norms):
                raise NotProven(f"its code takes another path in {str(own).removeprefix('torch.')}")
        return verdict

    def check(self, attributes: Sequence[AttributeChange], rescale: bool = False) -> Verdict:
        """Run all ranks with ``attributes`` (and rescaled sizes) and compare.

        Raises:
            NotProven: they differ, or the ranks need different rules.
            Exception: whatever the module's code raises when it runs on a share that does not fit.
        """
        worst, results_differ = 0.0, False
        rules: list[SizeRule] | None = None
        norms: set[str] = set()
        for full, parameters, inputs in self.references:
            passes = [self._forward(parameters, inputs, rank, attributes, full, rescale) for rank in range(self.size)]
            if (attributes or rescale or self.arguments) and any(one.run.recomputes for one in passes):
                raise NotProven("a part of its module is recomputed (torch.utils.checkpoint), which its changes miss")
            self._join_statistics(full, passes)
            ranks = [self._evidence(one) for one in passes]
            for rank in ranks:
                if (rules is not None and rank.rules != rules) or rank.local_norms != ranks[0].local_norms:
                    raise NotProven("its ranks or its inputs need different sizes")
                rules, norms = rank.rules, rank.local_norms
            worst = max(worst, self._compare(full, ranks))
            results_differ |= any(self._results_differ(full, rank) for rank in ranks)
            if worst > TOLERANCE[self.dtype]:
                raise NotProven(f"its numbers differ by {worst:.1e}{_DRAWS if self.draws else ''}")
        local = tuple(name for name in self.candidate.norms if name in norms)
        return Verdict(worst, tuple(rules or ()), local, results_differ)

    def _references(self) -> list[tuple[Evidence, _Values, tuple[Any, Any]]]:
        """The unsplit run on the inputs as captured, and with other values in the tensors that carry gradients."""
        references: list[tuple[Evidence, _Values, tuple[Any, Any]]] = []
        for seed in (0, 1):
            generator = torch.Generator().manual_seed(seed)
            parameters: dict[int, Tensor | ThinWeight] = {}
            for _, _, p in self.slots:
                linear = self.thin.get(id(p))
                parameters[id(p)] = (
                    randomised(p, self.dtype, generator)
                    if linear is None
                    else ThinWeight.random(linear, self.dtype, generator)
                )
            call = self.candidate.call
            inputs = prepared_inputs(call, self.dtype, generator if seed else None) if call else ((), {})
            references.append((self._evidence(self._forward(parameters, inputs)), parameters, inputs))
        return references

    def _forward(
        self,
        parameters: _Values,
        inputs: tuple[Any, Any],
        rank: int | None = None,
        attributes: Sequence[AttributeChange] = (),
        full: Evidence | None = None,
        rescale: bool = False,
    ) -> _Pass:
        """Run the module once, unsplit (``rank`` None) or as one rank, up to its last row."""
        local = dict(parameters)
        if rank is not None:
            local.update(self._shares(parameters, rank))
        leaves = {key: value.leaves() for key, value in local.items() if isinstance(value, ThinWeight)}
        tensors = {
            key: value.stand_in() if isinstance(value, ThinWeight) else nn.Parameter(value, has_gradient(value))
            for key, value in local.items()
        }
        of_weight = lambda linears: {id(tensors[id(linear.weight)]): linear for linear in linears.values()}  # noqa: E731
        run = RegionRun(
            {id(tensors[key]): thin for key, thin in leaves.items()},
            of_weight(self.columns),
            of_weight(self.rows),
            {id(tensors[key]): entry for key, entry in self.entries.items() if key in tensors},
            None if full is None else full.full_outputs,
            full.calls if full is not None and rescale else None,
            None if full is None else full.statistics,
        )
        changes = [] if rank is None else [*self.features[rank], *attributes]
        args, kwargs = copied_objects(inputs)
        if rank is not None and self.arguments:
            args, kwargs = sliced_arguments(positional_names(self.module), self.arguments, rank, args, kwargs)
        norms = {name: norm for name, norm in self.norms.items() if norm is not None}
        with (
            random_state_kept(),
            swapped(self.module, self.slots, tensors, self.dtype),
            changed_attributes(self.model, changes),
            run.normalising(self.model, norms),
            run,
        ):
            before = torch.get_rng_state()
            returned = self.run() if self.candidate.call is None else self.module(*args, **kwargs)
            self.draws |= not torch.equal(before, torch.get_rng_state())
        expected = self.rows if full is None else full.outputs
        if not run.outputs.keys() >= expected.keys():
            raise NotProven("its rows were not reached when its module ran by itself")
        inside = [leaf for _, leaf in run.inputs.values()] + run.entered
        shards = [tensors[self.ids[shard.parameter]] for shard in self.shards]
        results = [] if self.candidate.call is None else _results(returned, [*inside, *shards])
        sliced = {slice_.argument for slice_ in self.arguments}
        named = named_arguments(self.module, *inputs)
        cut = [leaf for name, leaf in named.items() if name in sliced and _is_float(leaf) and leaf.requires_grad]
        past = [
            leaf
            for leaf in tree_leaves(inputs)
            if isinstance(leaf, Tensor) and leaf.requires_grad and not any(leaf is other for other in cut)
        ]
        generator = torch.Generator().manual_seed(7)
        total = torch.zeros((), dtype=torch.float64, device=inside[0].device)
        for out in run.outputs.values():
            total = total + (out * torch.randn(out.shape, dtype=out.dtype, generator=generator).to(out.device)).sum()
        named_parameters: dict[str, Tensor] = {}
        for _, _, p in self.slots:
            name = self.parameter_names[id(p)]
            if id(p) in leaves:
                named_parameters |= {f"{name}{_OUT}": leaves[id(p)].out, f"{name}{_INTO}": leaves[id(p)].into}
            elif has_gradient(p):
                named_parameters[name] = tensors[id(p)]
        return _Pass(run, total, [*inside, *cut], past, named_parameters, results)

    def _join_statistics(self, full: Evidence, passes: list[_Pass]) -> None:
        """Let the gradient of every normalisation's sums, added over the ranks, flow into each rank's addends."""
        for position in sorted(passes[0].run.statistics, reverse=True):
            grads = []
            for one in passes:
                leaf = one.run.statistics[position][1]
                (grad,) = torch.autograd.grad(one.total, [leaf], retain_graph=True, allow_unused=True)
                grads.append(torch.zeros_like(leaf) if grad is None else grad)
            summed = torch.stack(grads).sum(0)
            for one in passes:
                one.total = one.total + (one.run.statistics[position][0] * summed).sum()

    def _evidence(self, one: _Pass) -> Evidence:
        """Take the gradients of a forward run."""
        targets = [*one.inputs, *one.past, *one.parameters.values()]
        grads: list[Tensor | None] = list(torch.autograd.grad(one.total, targets, allow_unused=True))
        entered, leaking = len(one.inputs), len(one.inputs) + len(one.past)
        run = one.run
        return Evidence(
            outputs={name: output.detach() for name, output in run.outputs.items()},
            full_outputs=run.with_bias,
            input_grads=grads[:entered],
            leaks=[str(i) for i, grad in enumerate(grads[entered:leaking]) if grad is not None and grad.any()],
            parameter_grads=dict(zip(one.parameters, grads[leaking:], strict=True)),
            results=one.results,
            statistics={position: partial.detach() for position, (partial, _) in run.statistics.items()},
            calls=run.calls,
            rules=run.rules,
            local_norms=run.local_norms,
        )

    def _shares(self, parameters: _Values, rank: int) -> dict[int, Tensor | ThinWeight]:
        shares: dict[int, Tensor | ThinWeight] = {}
        for column in self.candidate.columns:
            linear = self.columns[column.module]
            rows = column.row_indices(rank)
            shares[id(linear.weight)] = _thin(parameters[id(linear.weight)]).column_share(rows)
            bias = linear.module._parameters.get("bias")
            if bias is not None:
                shares[id(bias)] = _whole(parameters[id(bias)]).index_select(0, _index(rows, bias))
        for linear in self.rows.values():
            shares[id(linear.weight)] = _thin(parameters[id(linear.weight)]).row_share(rank, self.size)
        for shard in self.shards:
            whole = _whole(parameters[self.ids[shard.parameter]])
            shares[self.ids[shard.parameter]] = whole.index_select(shard.dim, _index(shard.row_indices(rank), whole))
        return shares

    def _results_differ(self, full: Evidence, rank: Evidence) -> bool:
        """Whether a tensor that the module returns, and that is not made from inside the region, is another one."""
        return any(
            difference(result.double(), [_as_double(rank.results, position)]) > TOLERANCE[self.dtype]
            for position, result in enumerate(full.results)
            if result is not None
        )

    def _compare(self, full: Evidence, ranks: list[Evidence]) -> float:
        """The largest relative difference between the unsplit evidence and that of all ranks together."""
        if full.leaks or any(rank.leaks for rank in ranks):
            raise NotProven("a tensor enters it past its columns")
        if not all(bool(output.isfinite().all()) for output in full.outputs.values()):
            raise NotProven("its numbers are not finite on the example input")
        worst = 0.0
        for name, output in full.outputs.items():
            worst = max(worst, difference(output, [rank.outputs[name] for rank in ranks]))
        for position in ranks[0].statistics:
            worst = max(worst, difference(full.statistics[position], [rank.statistics[position] for rank in ranks]))
        floor = rounding_floor([*full.input_grads, *full.parameter_grads.values()], self.dtype)
        for position, grad in enumerate(full.input_grads):
            worst = max(worst, difference(grad, [rank.input_grads[position] for rank in ranks], floor))
        index: dict[str, tuple[int, Split]] = {}
        summed = set(self.candidate.partial)
        for column in self.candidate.columns:
            name = f"{column.module}." if column.module else ""
            index |= {f"{name}weight{_OUT}": (0, column), f"{name}bias": (0, column)}
            summed.add(f"{name}weight{_INTO}")
        for shard in self.shards:
            index[shard.parameter] = (shard.dim, shard)
        rows = {f"{name}.weight{_INTO}" for name in self.rows}
        summed |= {f"{name}.weight{_OUT}" for name in self.rows}
        for name, grad in full.parameter_grads.items():
            per_rank = [rank.parameter_grads[name] for rank in ranks]
            if name in index and grad is not None:
                dim, split = index[name]
                per_rank = [scattered(share, grad, dim, split.row_indices(r)) for r, share in enumerate(per_rank)]
            elif name in rows and grad is not None:
                if any(share is None for share in per_rank):
                    raise NotProven(f"{name} has no gradient on some rank")
                per_rank = [torch.cat([share for share in per_rank if share is not None], 1)]
            elif name not in summed and grad is not None and bool(grad.any()):
                # Its gradient is not summed over the ranks: each must have the whole one.
                worst = max(worst, *(difference(grad, [part], floor) for part in per_rank))
                continue
            worst = max(worst, difference(grad, per_rank, floor))
        return worst


@dataclass(frozen=True)
class Verdict:
    """A proof that went through.

    Attributes:
        error: The largest relative difference.
        rules: The rules for sizes, the same on every rank.
        norms: The normalisations whose statistics are summed over the ranks.
        results_differ: Whether what the module returns beside its rows' outputs is not the same on every rank.
    """

    error: float
    rules: tuple[SizeRule, ...]
    norms: tuple[str, ...]
    results_differ: bool


def _thin(value: Tensor | ThinWeight) -> ThinWeight:
    assert isinstance(value, ThinWeight)  # what is used otherwise is no member of a candidate
    return value


def _whole(value: Tensor | ThinWeight) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _index(indices: list[int], like: Tensor) -> Tensor:
    return torch.tensor(indices, device=like.device)


def _results(returned: Any, leaves: list[Tensor]) -> list[Tensor | None]:
    """The tensors that the module returns, without those that depend on its columns other than through its rows."""
    results: list[Tensor | None] = []
    for value in tensors_in(returned):
        inside = value.requires_grad and any(
            grad is not None
            for grad in torch.autograd.grad(value.abs().sum(), leaves, retain_graph=True, allow_unused=True)
        )
        results.append(None if inside else value.detach())
    return results


def _periodic_split(sets: Tensor) -> tuple[int, tuple[Ranges, ...] | None]:
    """The shortest period with which the ranks' index sets ``[ranks, size]`` repeat, and their split within one."""
    size = sets.shape[1]
    for period in range(2, size + 1):
        if size % period == 0:
            folded = sets.view(sets.shape[0], size // period, period)
            if bool((folded == folded[:, :1]).all()):
                rows = split_of(folded[:, 0])
                if rows is not None:
                    return period, rows
    return 0, None


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _as_double(results: Sequence[Tensor | None], position: int) -> Tensor | None:
    result = results[position] if position < len(results) else None
    return None if result is None else result.double()
