"""Probe: which linears form column/row pairs, read off the computation.

The model runs once with every linear's output cut (:mod:`lightning_tp.plan.trace`). A linear's output is then a
producer and a linear's input a consumer, and the graph says which producers each consumer was computed from. The
connected components of this bipartite graph that do not contain the model's own output are the candidates: all their
producers become columns, all their consumers rows. One backward pass for each rank's chunk of a row's input features
then shows exactly which output rows of each column that rank needs, in whatever order they lie (fused weights
included).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tp.errors import ParallelConfigError
from lightning_tp.plan.graph import Reach, tensors_in
from lightning_tp.plan.linears import LinearAdapter, linear_adapter
from lightning_tp.plan.sharding_plan import Column, ranges_of
from lightning_tp.plan.trace import LinearCall, LinearTrace, ModuleCall, Run, module_calls

_LARGEST_LEGAL_SIZE = 1024
_MOST_RUNS = 32
"""Runs of the model at most; one is enough unless activations hide rows."""


@dataclass(frozen=True)
class SplittableLinear:
    """A linear of the model that an adapter knows."""

    name: str
    module: nn.Module
    adapter: LinearAdapter

    @property
    def weight(self) -> nn.Parameter:
        return self.module._parameters["weight"]  # type: ignore[return-value]

    @property
    def output_features(self) -> int:
        return self.weight.shape[self.adapter.output_dim]

    @property
    def input_features(self) -> int:
        return self.weight.shape[self.adapter.input_dim]

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.module._parameters.values() if p is not None)


@dataclass(frozen=True)
class Candidate:
    """A part of the computation that may become a region.

    Attributes:
        columns: The column-parallel linears with the rows of each rank.
        rows: Names of the row-parallel linears.
        inputs: Names of the columns grouped by the input tensor that they share.
        call: The innermost module call that holds all of it; None where that is the whole run.
        partial: Parameters that are read between columns and rows.
        random: Whether a dropout lies between columns and rows.
    """

    columns: tuple[Column, ...]
    rows: tuple[str, ...]
    inputs: tuple[tuple[str, ...], ...]
    call: ModuleCall | None
    partial: tuple[str, ...]
    random: bool


@dataclass(frozen=True)
class Misfit:
    """Linears that other tensor-parallel sizes can split, but not the one asked for."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    legal_sizes: tuple[int, ...]


@dataclass
class Probe:
    """What the probe has found."""

    linears: dict[str, SplittableLinear]
    candidates: list[Candidate]
    misfits: list[Misfit]
    reasons: dict[str, str]
    """For each linear that is in no candidate: why."""


def splittable_linears(model: nn.Module) -> dict[str, SplittableLinear]:
    """The linears of ``model`` that an adapter knows, by module name."""
    found = {}
    for name, module in model.named_modules():
        adapter = linear_adapter(module)
        if adapter is not None:
            found[name] = SplittableLinear(name, module, adapter)
    return found


def probe(model: nn.Module, run: Callable[[], Any], tensor_parallel_size: int) -> Probe:
    """Run ``model`` through ``run`` once and find the candidates for ``tensor_parallel_size`` ranks.

    The caller keeps random state and module state (:mod:`lightning_tp.plan.state`) and has made all parameters
    require gradients.
    """
    linears = splittable_linears(model)
    weights = {id(linear.weight): linear.weight for linear in linears.values()}

    def traced(seed: int) -> Run:
        trace = LinearTrace(weights, seed)
        with module_calls(model, trace.stack, trace.run.outermost), trace:
            trace.run.outputs = run()
        return trace.run

    return _Analysis(model, linears, traced, tensor_parallel_size).result()


def _outputs(run: Run) -> list[Tensor]:
    """What the run returns; where that is no tensor (a validation step), what its outermost modules return."""
    outputs = list(tensors_in(run.outputs)) or list(tensors_in(run.outermost))
    if not outputs:
        raise ParallelConfigError(
            "The model returns no tensor in the run that plans its split, so nothing shows what is computed from it. "
            "Return the loss from the step, or set example_input_array on the LightningModule."
        )
    return outputs


class _Analysis:
    def __init__(
        self,
        model: nn.Module,
        linears: dict[str, SplittableLinear],
        traced: Callable[[int], Run],
        tensor_parallel_size: int,
    ) -> None:
        run = traced(0)
        self.linears, self.run, self.traced, self.size = linears, run, traced, tensor_parallel_size
        self.runs = [run]
        self.parameter_names = {id(p): name for name, p in model.named_parameters()}
        parameters = list(model.parameters())
        self.parameter_of_bit = dict(enumerate(parameters, start=len(run.calls)))
        self.reach = Reach([*(call.y for call in run.calls), *parameters])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.consumed = [self.reach.of(call.x) for call in run.calls]
            self.returned = 0
            for tensor in (*_outputs(run), *run.observed):
                self.returned |= self.reach.of(tensor)
        self.ineligible = self._ineligible()
        self.reasons = dict(self.ineligible)
        self.misfits: list[Misfit] = []
        self.candidates: list[Candidate] = []
        self.occurrences: dict[int, int] = {}

    def result(self) -> Probe:
        for producers, consumers in self._components():
            self._consider(producers, consumers)
        self._drop_inconsistent()
        accepted: set[str] = set()
        for candidate in self.candidates:
            accepted |= _members(candidate)
        for name in self.linears:
            if name in accepted:
                self.reasons.pop(name, None)
            else:
                self.reasons.setdefault(name, "its output is returned whole")
        return Probe(self.linears, self.candidates, self.misfits, self.reasons)

    def _ineligible(self) -> dict[str, str]:
        reasons: dict[str, str] = {}
        owners: dict[int, list[str]] = {}
        for name, linear in self.linears.items():
            owners.setdefault(id(linear.weight), []).append(name)
        called = {call.owner for call in self.run.calls}
        for name, linear in self.linears.items():
            others = [other for other in owners[id(linear.weight)] if other != name]
            if others:
                reasons[name] = f"its weight is tied to {', '.join(others)}"
            elif id(linear.weight) in self.run.foreign_uses:
                reasons[name] = "its weight is also used elsewhere than in its own forward"
            elif any(call.weight is linear.weight and call.owner != name for call in self.run.calls):
                reasons[name] = "its weight is used without calling the module"
            elif name not in called:
                reasons[name] = "it was not called when the model was probed"
        return reasons

    def _components(self) -> list[tuple[list[int], list[int]]]:
        """Producers and consumers that are connected, without the component of the model's output."""
        number = len(self.run.calls)
        parent = list(range(2 * number + 1))
        output = 2 * number

        def root(node: int) -> int:
            while parent[node] != node:
                parent[node] = parent[parent[node]]
                node = parent[node]
            return node

        used: set[int] = set()
        for producer in range(number):
            if self.returned >> producer & 1:
                parent[root(producer)] = root(output)
            for consumer in range(producer + 1, number):
                if self.consumed[consumer] >> producer & 1:
                    used.add(producer)
                    parent[root(producer)] = root(number + consumer)
        components: dict[int, tuple[list[int], list[int]]] = {}
        for producer in sorted(used):
            if root(producer) != root(output):
                components.setdefault(root(producer), ([], []))[0].append(producer)
        for consumer in range(number):
            if root(number + consumer) in components:
                components[root(number + consumer)][1].append(consumer)
        return sorted(components.values(), key=lambda component: component[0])

    def _consider(self, producers: list[int], consumers: list[int]) -> None:
        """Accept a component as a candidate, or note why not."""
        calls = self.run.calls
        members = [calls[index].owner or self._weight_name(calls[index]) for index in (*producers, *consumers)]
        taken = next((c for c in self.candidates if _members(c) & set(members)), None)
        reason = next((self.ineligible[name] for name in members if name in self.ineligible), None)
        if reason is None and len(set(members)) < len(members):
            reason = "a linear of its group is called several times within it"
        if reason is not None:
            self._reject(members, reason if len(members) == 1 else f"{reason} (group: {_listed(members)})")
            return
        columns, reason = self._split(producers, consumers, self.size)
        if reason is not None:
            legal = self._legal_sizes(producers, consumers)
            if len(legal) > 1 and taken is None:
                names = [str(calls[index].owner) for index in (*producers, *consumers)]
                self.misfits.append(Misfit(tuple(names[: len(producers)]), tuple(names[len(producers) :]), legal))
                reason = f"{self.size} ranks do not fit; legal sizes: {_listed(legal)}"
            self._reject(members, reason)
            return
        partial, reason = self._inner_parameters(consumers)
        if reason is not None:
            self._reject(members, reason)
            return
        first, last = calls[min(producers)], calls[max(consumers)]
        candidate = Candidate(
            columns=tuple(columns),
            rows=tuple(str(calls[index].owner) for index in consumers),
            inputs=self._shared_inputs(producers),
            call=_common_call([calls[index] for index in (*producers, *consumers)]),
            partial=partial,
            random=last.random_before > first.random_before,
        )
        if taken is None:
            self.candidates.append(candidate)
            self.occurrences[id(candidate)] = 1
        elif (taken.columns, taken.rows, taken.inputs) == (candidate.columns, candidate.rows, candidate.inputs):
            self.occurrences[id(taken)] += 1
        else:
            self._reject(set(members) - _members(taken), f"its group overlaps with the region of {_listed(taken.rows)}")

    def _reject(self, members: Iterable[str], reason: str) -> None:
        for name in members:
            self.reasons.setdefault(name, reason)

    def _weight_name(self, call: LinearCall) -> str:
        return self.parameter_names[id(call.weight)].rpartition(".")[0]

    def _split(self, producers: list[int], consumers: list[int], size: int) -> tuple[list[Column], str | None]:
        """The rows of every column that each of ``size`` ranks needs, or why there are none."""
        outputs = [self.run.calls[producer] for producer in producers]
        needed = [torch.zeros(size, call.y.shape[-1], dtype=torch.bool) for call in outputs]
        for consumer in consumers:
            if self.run.calls[consumer].x.shape[-1] % size:
                return [], f"{size} ranks do not divide the input features of {self.run.calls[consumer].owner}"
        for number in range(_MOST_RUNS):
            for consumer, rank in itertools.product(consumers, range(size)):
                for rows, more in zip(needed, self._rows_needed(number, consumer, rank, size, producers), strict=True):
                    rows[rank] |= more
                if size > 1 and all(rows[rank].all() for rows in needed):
                    return [], f"every rank would need all outputs of {_listed(call.owner for call in outputs[:3])}"
            if all(rows.any(0).all() for rows in needed):
                break
        columns = []
        for call, rows in zip(outputs, needed, strict=True):
            if not rows.any(0).all():
                return [], f"not every output of {call.owner} reaches the rows of its group"
            if len(set(rows.sum(1).tolist())) > 1:
                return [], f"the ranks would need unequal shares of the outputs of {call.owner}"
            if any((a & b).any() and not torch.equal(a, b) for a, b in itertools.combinations(rows, 2)):
                return [], f"the ranks' shares of the outputs of {call.owner} would overlap in part"
            columns.append(Column(str(call.owner), tuple(ranges_of(row.nonzero().flatten().tolist()) for row in rows)))
        if not any(column.is_sharded for column in columns):
            return [], f"the ranks would share outputs of all of {_listed(column.module for column in columns[:3])}"
        return columns, None

    def _rows_needed(self, number: int, consumer: int, rank: int, size: int, producers: list[int]) -> list[Tensor]:
        """For each producer the output rows that ``rank`` was seen to need for ``consumer`` in run ``number``.

        One run may miss rows that an activation has cut off (a ReLU below zero), which another run shows.
        """
        calls = self._calls(number)
        x = calls[consumer].x
        share = x.shape[-1] // size
        chunk = x.narrow(-1, rank * share, share)
        generator = torch.Generator(chunk.device).manual_seed(rank)
        weights = torch.randn(chunk.shape, dtype=chunk.dtype, device=chunk.device, generator=generator)
        outputs = [calls[producer].y for producer in producers]
        grads = torch.autograd.grad((chunk * weights).sum(), outputs, retain_graph=True, allow_unused=True)
        return [
            torch.zeros(y.shape[-1], dtype=torch.bool)
            if grad is None
            else (grad.reshape(-1, grad.shape[-1]) != 0).any(0).cpu()
            for y, grad in zip(outputs, grads, strict=True)
        ]

    def _calls(self, number: int) -> list[LinearCall]:
        """The calls of run ``number``, which takes place when it is first asked for."""
        if number == len(self.runs):
            self.runs.append(self.traced(number))
        calls = self.runs[number].calls
        if [call.owner for call in calls] != [call.owner for call in self.run.calls]:
            raise ParallelConfigError(
                "The model calls other linears each time it is run on one input, so its split cannot be planned. "
                "Give the strategy a saved plan."
            )
        return calls

    def _legal_sizes(self, producers: list[int], consumers: list[int]) -> tuple[int, ...]:
        """The sizes that split this group: multiples are built up from primes, so few are tried."""
        features = [self.run.calls[consumer].x.shape[-1] for consumer in consumers]
        limit = min(*features, _LARGEST_LEGAL_SIZE) if features else 1
        common = [size for size in range(2, limit + 1) if all(count % size == 0 for count in features)]
        legal = {1}
        for size in common:
            smaller = [divisor for divisor in common if divisor < size and size % divisor == 0]
            if all(divisor in legal for divisor in smaller) and self._split(producers, consumers, size)[1] is None:
                legal.add(size)
        return tuple(sorted(legal))

    def _inner_parameters(self, consumers: list[int]) -> tuple[tuple[str, ...], str | None]:
        """Parameters that are read between columns and rows, or why one of them cannot be."""
        inside = 0
        for consumer in consumers:
            inside |= self.consumed[consumer]
        same_rows = {self.run.calls[consumer].owner for consumer in consumers}
        outside = self.returned
        for index, mask in enumerate(self.consumed):
            if self.run.calls[index].owner not in same_rows:
                outside |= mask
        names = []
        for bit, parameter in self.parameter_of_bit.items():
            if inside >> bit & 1:
                name = self.parameter_names[id(parameter)]
                if outside >> bit & 1:
                    return (), f"the parameter {name} is used inside its group and outside of it"
                names.append(name)
        return tuple(names), None

    def _shared_inputs(self, producers: list[int]) -> tuple[tuple[str, ...], ...]:
        groups: dict[int, list[str]] = {}
        for producer in producers:
            call = self.run.calls[producer]
            groups.setdefault(id(call.x), []).append(str(call.owner))
        return tuple(tuple(names) for names in groups.values())

    def _drop_inconsistent(self) -> None:
        """A linear that is called again must be called in the same group of the same linears each time."""
        for candidate in list(self.candidates):
            for name in _members(candidate):
                calls = sum(call.owner == name for call in self.run.calls)
                if calls != self.occurrences[id(candidate)]:
                    self.candidates.remove(candidate)
                    self._reject(
                        _members(candidate), f"{name} is called {calls} times, and not in the same group each time"
                    )
                    break


def _members(candidate: Candidate) -> set[str]:
    return {column.module for column in candidate.columns} | set(candidate.rows)


def _common_call(calls: list[LinearCall]) -> ModuleCall | None:
    common: ModuleCall | None = None
    for level in zip(*(call.stack for call in calls), strict=False):
        if any(entry is not level[0] for entry in level):
            break
        common = level[0]
    return common


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
