"""Reading candidates off a traced run: what each linear was computed from, and which part of it each rank needs."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial as partial_function
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tp.errors import ParallelConfigError
from lightning_tp.plan.candidate import USED_BY_HAND, USED_ELSEWHERE, Candidate, Fit, Probe
from lightning_tp.plan.graph import Reach, connected, tensors_in
from lightning_tp.plan.linears import SplittableLinear
from lightning_tp.plan.needs import IndexSets, index_sets, is_clean, note, split_of, union
from lightning_tp.plan.norms import Norm
from lightning_tp.plan.sharding_plan import Column, Entry, SplitParameter, ranges_of
from lightning_tp.plan.trace import LinearCall, ModuleCall, Run

_LARGEST_LEGAL_SIZE = 64
_MOST_RUNS = 32
"""Runs of the model at most; one is enough unless activations hide rows."""


@dataclass
class _Needs:
    """What each rank's share of some consumers was computed from, by (consumer, producer); dense where it is all."""

    rows: dict[tuple[int, int], Tensor]
    dense: bool


class Analysis:
    def __init__(
        self,
        model: nn.Module,
        linears: dict[str, SplittableLinear],
        traced: Callable[[int, Mapping[str, Norm]], Run],
        tensor_parallel_size: int,
        norms: Mapping[str, Norm],
    ) -> None:
        run = traced(0, norms)
        self.linears, self.run, self.traced, self.size, self.norms = linears, run, traced, tensor_parallel_size, norms
        self.runs = [run]
        self.parameters = dict(model.named_parameters())
        self.parameter_names = {id(p): name for name, p in self.parameters.items()}
        parameters = list(self.parameters.values())
        self.parameter_of_bit = dict(enumerate(parameters, start=len(run.calls)))
        self.reach = Reach([*(call.y for call in run.calls), *parameters])
        self.outputs = [*outputs_of(run), *run.observed]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.consumed = [self.reach.of(call.x) for call in run.calls]
            self.norm_inputs = [(name, self.reach.of(x)) for name, x in run.norm_inputs]
            self.returned = self._reached(self.outputs)
            self.observed = self._reached(run.observed)
            self.differentiated = self._reached(run.differentiated)
            for index in reversed(range(len(run.calls))):
                if self.differentiated >> index & 1:
                    self.differentiated |= self.consumed[index]
        self.ineligible = self._ineligible()
        self.read_biases = self._read_biases(model)
        self.reasons = dict(self.ineligible)
        self.misfits: list[Fit] = []
        self.candidates: list[Candidate] = []
        self.rejected: list[list[str]] = []
        self.occurrences: dict[int, int] = {}
        self.known_needs: dict[Any, _Needs] = {}
        self.known_legal_sizes: dict[Any, tuple[int, ...]] = {}
        self.known_parameter_needs: dict[Any, dict[str, IndexSets]] = {}

    def _reached(self, tensors: Iterable[Tensor]) -> int:
        """The cut outputs and parameters that any of ``tensors`` was computed from, as a bit mask."""
        return reduce(or_, map(self.reach.of, tensors), 0)

    def find_candidates(self, settled: Sequence[Candidate]) -> None:
        """Consider every component in which no linear of the ``settled`` candidates takes part.

        Small ones come first: where two share a linear, the pair is the split, and not the web around it.
        """
        taken = {name for candidate in settled for name in candidate.members}
        for producers, consumers in sorted(self._components(), key=lambda found: len(found[0]) + len(found[1])):
            if taken.isdisjoint(self._names((*producers, *consumers))):
                self._consider(producers, consumers)
        self._drop_inconsistent()
        self._drop_unequal_uses()
        self.candidates = [*settled, *self.candidates]
        first = {call.owner: index for index, call in reversed(list(enumerate(self.run.calls)))}
        self.candidates.sort(key=lambda candidate: first[candidate.columns[0].module])

    def result(self) -> Probe:
        accepted: set[str] = set()
        for candidate in self.candidates:
            accepted |= candidate.members
        for name in self.linears:
            if name in accepted:
                self.reasons.pop(name, None)
            elif any(c.owner == name and self.observed >> i & 1 for i, c in enumerate(self.run.calls)):
                self.reasons.setdefault(name, "its output is turned into a number of Python, compared or logged")
            else:
                self.reasons.setdefault(name, "its output is returned whole")
        consumed = 0
        for mask in self.consumed:
            consumed |= mask
        inner = {call.owner for index, call in enumerate(self.run.calls) if consumed >> index & 1}
        called = dict.fromkeys(call.owner for call in self.run.calls if call.owner is not None)
        finals = [name for name in called if name not in inner]
        readers = {self.parameter_names[key]: found for key, found in self.run.readers.items()
                   if key in self.parameter_names}  # fmt: skip
        return Probe(self.linears, self.candidates, self.misfits, self.reasons, self.run, finals, readers)

    def has_free_columns(self) -> bool:
        """Whether a component was rejected of which some producer is in no candidate."""
        taken = {name for candidate in self.candidates for name in candidate.members} | self.ineligible.keys()
        return any(not taken.issuperset(producers) for producers in self.rejected)

    def _names(self, calls: Iterable[int]) -> list[str]:
        return [self.run.calls[index].owner or self._weight_name(self.run.calls[index]) for index in calls]

    def _ineligible(self) -> dict[str, str]:
        reasons: dict[str, str] = {}
        owners: dict[int, list[str]] = {}
        for name, linear in self.linears.items():
            owners.setdefault(id(linear.weight), []).append(name)
        called = {call.owner for call in self.run.calls}
        filled = {call.owner for call in self.run.calls if call.y.numel()}
        differentiated = {c.owner for i, c in enumerate(self.run.calls) if self.differentiated >> i & 1}
        for name, linear in self.linears.items():
            others = [other for other in owners[id(linear.weight)] if other != name]
            if others:
                reasons[name] = f"its weight is tied to {', '.join(others)}"
            elif id(linear.weight) in self.run.transformed:
                reasons[name] = "it is called inside a function transform of torch (vmap, grad)"
            elif id(linear.weight) in self.run.foreign_uses:
                reasons[name] = USED_ELSEWHERE
            elif name in differentiated:
                reasons[name] = "the model itself takes gradients through it"
            elif linear.module._backward_hooks or linear.module._backward_pre_hooks:
                reasons[name] = "it has a backward hook, which would see one rank's part of its gradients"
            elif any(call.weight is linear.weight and call.owner != name for call in self.run.calls):
                reasons[name] = USED_BY_HAND
            elif name not in called:
                reasons[name] = "it was not called when the model was probed"
            elif name not in filled:
                reasons[name] = "no elements went through it when the model was probed"
        return reasons

    def _read_biases(self, model: nn.Module) -> dict[str, str]:
        """Linears whose bias other code reads too: no columns, which have a part of it only."""
        holders = Counter(id(p) for module in model.modules() for p in module._parameters.values())
        reasons = {}
        for name, linear in self.linears.items():
            bias = linear.module._parameters.get("bias")
            if bias is not None and (holders[id(bias)] > 1 or id(bias) in self.run.foreign_uses):
                reasons[name] = f"the bias of {name} is also used elsewhere than in its own forward"
        return reasons

    def _components(self) -> list[tuple[list[int], list[int]]]:
        """Producers and consumers that are connected, without the component of the model's output."""
        number = len(self.run.calls)
        edges = [(p, c) for c in range(number) for p in range(c) if self.consumed[c] >> p & 1]
        returned = [p for p in range(number) if self.returned >> p & 1]
        return connected(edges, number, returned)

    def _consider(self, producers: list[int], consumers: list[int]) -> None:
        """Accept a component, or parts of it, as candidates, or note why not."""
        before = len(self.misfits)
        reason = self._accept(producers, consumers, ())
        if reason is None:
            return
        misfits = self.misfits[before:]
        parts = [self._accept(*part) for part in self._refined(producers, consumers)]
        if None in parts:
            self.misfits = [misfit for misfit in self.misfits if misfit not in misfits]
        self.rejected.append(self._names(producers))
        self._reject(self._names((*producers, *consumers)), reason)

    def _accept(self, producers: list[int], consumers: list[int], entries: tuple[Entry, ...]) -> str | None:
        """Take a component as a candidate, or say why not."""
        calls = self.run.calls
        members = self._names((*producers, *consumers))
        taken = next((c for c in self.candidates if c.members & set(members)), None)
        reason = next((self.ineligible[name] for name in members if name in self.ineligible), None)
        rows = self._names(consumers)
        between = [name for name in rows if name in self._names(producers)]
        if reason is None and between:
            reason = f"what it gives reaches {between[0]} and what comes after that"
        if reason is None:
            reason = next((self.read_biases[n] for n in self._names(producers) if n in self.read_biases), None)
        if reason is None and len(set(rows)) < len(rows):
            reason = "a row of its group is called several times within it"
        if reason is not None:
            return reason if len(members) == 1 else f"{reason} (group: {_listed(members)})"
        columns, reason = self._split(producers, consumers, self.size)
        if reason is not None:
            misfit = self._misfit(producers, consumers)
            if misfit is not None and taken is None:
                self.misfits.append(misfit)
                reason = misfit.reason(self.size)
            return reason
        partial, shards, reason = self._inner_parameters(producers, consumers)
        if reason is not None:
            return reason
        first, last = calls[min(producers)], calls[max(consumers)]
        mask = sum(1 << producer for producer in producers)
        candidate = Candidate(
            columns=tuple(columns),
            rows=tuple(rows),
            inputs=self._shared_inputs(producers),
            stack=_common_calls([calls[index] for index in (*producers, *consumers)]),
            partial=partial,
            shards=shards,
            entries=entries,
            norms=tuple(dict.fromkeys(name for name, reached in self.norm_inputs if reached & mask)),
            random=last.random_before > first.random_before,
            legal_sizes=partial_function(self._legal_sizes, producers, consumers),
        )
        if taken is None:
            self.candidates.append(candidate)
            self.occurrences[id(candidate)] = 1
        elif taken.matches(candidate):
            self.occurrences[id(taken)] += 1
        else:
            self._reject(set(members) - taken.members, f"its group overlaps with the region of {_listed(taken.rows)}")
        return None

    def _reject(self, members: Iterable[str], reason: str) -> None:
        for name in members:
            self.reasons.setdefault(name, reason)

    def _weight_name(self, call: LinearCall) -> str:
        return self.parameter_names[id(call.weight)].rpartition(".")[0]

    def _split(self, producers: list[int], consumers: list[int], size: int) -> tuple[list[Column], str | None]:
        """The rows of every column that each of ``size`` ranks needs, or why there are none."""
        calls = self.run.calls
        for consumer in consumers:
            if calls[consumer].x.shape[-1] % size:
                return [], f"{size} ranks do not divide the input features of {calls[consumer].owner}"
        needs = self._needs(producers, consumers, size)
        if needs.dense:
            return [], f"every rank would need all outputs of {_listed(self._distinct(producers)[:3])}"
        return self._columns(self._rows_of_columns(producers, needs))

    def _distinct(self, calls: Iterable[int]) -> list[str]:
        return list(dict.fromkeys(self._names(calls)))

    def _rows_of_columns(self, producers: list[int], needs: _Needs) -> dict[str, Tensor]:
        """By name of each column the rows ``[ranks, features]`` that are needed, over all its calls."""
        calls = self.run.calls
        return {
            name: union(needs.rows[c, p] for c, p in needs.rows if calls[p].owner == name)
            for name in self._distinct(producers)
        }

    def _columns(self, needed: Mapping[str, Tensor]) -> tuple[list[Column], str | None]:
        """The columns whose ranks have the rows ``needed``, or why they are none."""
        shared = total = 0
        columns = []
        for name, rows in needed.items():
            if not rows.any(0).all():
                return [], f"not every output of {name} reaches the rows of its group"
            if len(set(rows.sum(1).tolist())) > 1:
                return [], f"the ranks would need unequal shares of the outputs of {name}"
            width = self.linears[name].input_features
            shared += width * int((rows.sum(0) > 1).sum())
            total += width * rows.shape[1]
            columns.append(Column(tuple(ranges_of(row.nonzero().flatten().tolist()) for row in rows), name))
        if 2 * shared > total:
            return [], f"several ranks would need the same outputs of {_listed(list(needed)[:3])}"
        return columns, None

    def _needs(self, producers: list[int], consumers: list[int], size: int) -> _Needs:
        """Which rows of the producers each rank's share of the consumers' inputs was computed from.

        One run may miss rows that an activation has cut off (a ReLU below zero), which another run shows.
        """
        # By places within the block that holds them, so that repeated blocks are looked at once.
        places = self._places((*producers, *consumers))
        at = dict(zip((*producers, *consumers), places, strict=True))
        key = (places, len(producers), size)
        if key in self.known_needs:
            known = self.known_needs[key]
            pairs = itertools.product(consumers, producers)
            return _Needs(
                {(c, p): known.rows[at[c], at[p]] for c, p in pairs if (at[c], at[p]) in known.rows}, known.dense
            )
        rows: dict[tuple[int, int], Tensor] = {}
        readers = {p: [c for c in consumers if self.consumed[c] >> p & 1] for p in producers}
        sources = {c: [p for p in producers if self.consumed[c] >> p & 1] for c in consumers}
        dense = False
        for number in range(_MOST_RUNS):
            needed_by_all: set[int] = set()
            # Those that depend on most come first: where they show that nothing is split, the others are not asked.
            for consumer in sorted(consumers, key=lambda c: -len(sources[c])):
                self._note_rows(number, consumer, sources[consumer], size, rows)
                needed_by_all |= {p for p in sources[consumer] if int(rows[consumer, p].all(1).sum()) > 1}
                if size > 1 and len(needed_by_all) == len(producers):
                    dense = True
                    break
            if dense or all(bool(union(rows[c, p] for c in readers[p]).any(0).all()) for p in producers):
                break
        self.known_needs[key] = _Needs({(at[c], at[p]): sets for (c, p), sets in rows.items()}, dense)
        return _Needs(rows, dense)

    def _places(self, calls: Sequence[int]) -> tuple[Any, ...]:
        """Where each of ``calls`` stands within the innermost module call that holds them all."""
        found = [self.run.calls[index] for index in calls]
        common = _common_calls(found)
        if len(common) < 2:  # the whole model, of which there is one
            return tuple(calls)
        kind, start = self.run.kind(common[-1]), common[-1].operations.start
        return tuple((kind, call.operation - start) for call in found)

    def _note_rows(
        self, number: int, consumer: int, producers: list[int], size: int, rows: dict[tuple[int, int], Tensor]
    ) -> None:
        """Add to ``rows`` which rows of ``producers`` each rank's share of a consumer's input was computed from."""
        outputs = [self._calls(number)[producer].y for producer in producers]
        found = [
            rows.setdefault((consumer, p), torch.zeros(size, y.shape[-1], dtype=torch.bool))
            for p, y in zip(producers, outputs, strict=True)
        ]
        for rank in range(size):
            grads = self._gradients(number, consumer, rank, size, outputs)
            for sets, grad in zip(found, grads, strict=True):
                if grad is not None:
                    sets[rank] |= (grad.reshape(-1, grad.shape[-1]) != 0).any(0).cpu()
            if rank and all(sets[: rank + 1].all() for sets in found):
                # Two ranks that both need everything are no split: the others do not matter.
                for sets in found:
                    sets[:] = True
                return

    def _parameter_needs(self, producers: list[int], consumers: list[int]) -> dict[str, IndexSets]:
        """Which part of each parameter that is read on the way each rank's share was computed from."""
        inside = 0
        for consumer in consumers:
            inside |= self.consumed[consumer]
        inner = {self.parameter_names[id(p)]: p for bit, p in self.parameter_of_bit.items() if inside >> bit & 1}
        common = _common_calls([self.run.calls[index] for index in (*producers, *consumers)])
        block = f"{common[-1].name}." if common and common[-1].name else ""
        if not inner:
            return {}
        key = (self._places((*producers, *consumers)), tuple(name.removeprefix(block) for name in inner))
        if key in self.known_parameter_needs:
            return dict(zip(inner, self.known_parameter_needs[key].values(), strict=True))
        sets = {name: index_sets(parameter.shape, self.size) for name, parameter in inner.items()}
        runs = len(self.runs)  # as many as have shown all rows
        for number, consumer, rank in itertools.product(range(runs), consumers, range(self.size)):
            grads = self._gradients(number, consumer, rank, self.size, list(inner.values()))
            for name, grad in zip(inner, grads, strict=True):
                note(sets[name], rank, grad)
        self.known_parameter_needs[key] = sets
        return sets

    def _gradients(
        self, number: int, consumer: int, rank: int, size: int, targets: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Of a random sum over ``rank``'s chunk of a consumer's input in run ``number``."""
        if not targets:
            return ()
        x = self._calls(number)[consumer].x
        share = x.shape[-1] // size
        chunk = x.narrow(-1, rank * share, share)
        generator = torch.Generator(chunk.device).manual_seed(rank)
        weights = torch.randn(chunk.shape, dtype=chunk.dtype, device=chunk.device, generator=generator)
        return torch.autograd.grad((chunk * weights).sum(), targets, retain_graph=True, allow_unused=True)

    def _calls(self, number: int) -> list[LinearCall]:
        """The calls of run ``number``, which takes place when it is first asked for."""
        if number == len(self.runs):
            self.runs.append(self.traced(number, self.norms))
        calls = self.runs[number].calls
        if [call.owner for call in calls] != [call.owner for call in self.run.calls]:
            raise ParallelConfigError(
                "The model calls other linears each time it is run on one input, so its split cannot be planned. "
                "Give the strategy a saved plan."
            )
        return calls

    def _refined(
        self, producers: list[int], consumers: list[int]
    ) -> list[tuple[list[int], list[int], tuple[Entry, ...]]]:
        """The parts of a component that remain when what every rank needs alike is taken as an input."""
        if any(self.run.calls[consumer].x.shape[-1] % self.size for consumer in consumers):
            return []
        needs = self._needs(producers, consumers, self.size)
        if needs.dense:
            return []
        used = {pair: rows for pair, rows in needs.rows.items() if rows.any()}
        alike = {pair: rows[0] for pair, rows in used.items() if bool((rows == rows[0]).all())}
        split = [pair for pair in used if pair not in alike]
        good_rows = set(consumers)
        good_columns = {
            p for p in producers if (sets := [used[pair] for pair in split if pair[1] == p]) and is_clean(union(sets))
        }
        while True:
            # A row reads columns only, and a column is read by rows only, but for what all ranks need alike.
            bad_rows = {c for c, p in split if c in good_rows and p not in good_columns}
            bad_columns = {p for c, p in used if p in good_columns and c not in good_rows - bad_rows}
            if not bad_rows and not bad_columns:
                break
            good_rows -= bad_rows
            good_columns -= bad_columns
        edges = [(p, c) for c, p in split if c in good_rows and p in good_columns]
        parts = []
        for part_producers, part_consumers in connected(edges, len(self.run.calls), []):
            if any(p in part_producers and c not in part_consumers for c, p in alike):
                continue  # its columns are read elsewhere too
            entries: dict[str, Entry] | None = {}
            for producer in producers:
                rows = [alike[c, producer] for c in part_consumers if (c, producer) in alike]
                if not rows or entries is None:
                    continue
                entry = self._entry(producer, part_producers, part_consumers, union(rows))
                entries = None if entry is None or entry.module in entries else {**entries, entry.module: entry}
            if entries is not None:
                parts.append((part_producers, part_consumers, tuple(entries.values())))
        return parts

    def _entry(self, producer: int, producers: list[int], consumers: list[int], rows: Tensor) -> Entry | None:
        """``producer`` as an entry that is used as ``rows`` inside a part, if these rows are used nowhere else."""
        call = self.run.calls[producer]
        if producer in producers or call.owner is None or call.owner in self.ineligible:
            return None
        others = [c.x for index, c in enumerate(self.run.calls) if index not in consumers]
        elsewhere = [t for t in (*others, *self.outputs) if self.reach.of(t) >> producer & 1 and t.requires_grad]
        total = sum((t * torch.randn_like(t)).sum() for t in elsewhere)
        if isinstance(total, Tensor):
            (grad,) = torch.autograd.grad(total, [call.y], retain_graph=True, allow_unused=True)
            if grad is not None and (rows.to(grad.device) & (grad.reshape(-1, grad.shape[-1]) != 0).any(0)).any():
                return None
        return Entry((ranges_of(rows.nonzero().flatten().tolist()),), call.owner)

    def _misfit(self, producers: list[int], consumers: list[int]) -> Fit | None:
        """What to say of a group that this size does not split, if other sizes do."""
        known = self.known_needs.get((self._places((*producers, *consumers)), len(producers), self.size))
        legal = self._legal_sizes(producers, consumers) if known is None or not known.dense else (1,)
        rows = tuple(self._names(consumers))
        return Fit(tuple(self._distinct(producers)), rows, legal) if len(legal) > 1 else None

    def _legal_sizes(self, producers: list[int], consumers: list[int]) -> tuple[int, ...]:
        """The sizes up to 64 that split this group without cutting a head.

        What a rank needs is what the smaller chunks of its share need: only sizes that divide no other are run.
        """
        key = (self._places((*producers, *consumers)), len(producers))
        if key not in self.known_legal_sizes:
            self.known_legal_sizes[key] = self._searched_legal_sizes(producers, consumers)
        return self.known_legal_sizes[key]

    def _searched_legal_sizes(self, producers: list[int], consumers: list[int]) -> tuple[int, ...]:
        features = [self.run.calls[consumer].x.shape[-1] for consumer in consumers]
        limit = min(*features, _LARGEST_LEGAL_SIZE) if features else 1
        common = [size for size in range(2, limit + 1) if all(count % size == 0 for count in features)]
        legal = {1}
        for unit in [size for size in common if not any(other > size and other % size == 0 for other in common)]:
            needs = self._needs(producers, consumers, unit)
            if needs.dense:
                continue
            rows = self._rows_of_columns(producers, needs)
            for size in (size for size in common if unit % size == 0 and size not in legal):
                columns, reason = self._columns({n: r.view(size, unit // size, -1).any(1) for n, r in rows.items()})
                if reason is None and not any(column.overlaps for column in columns):
                    legal.add(size)
        return tuple(sorted(legal))

    def _inner_parameters(
        self, producers: list[int], consumers: list[int]
    ) -> tuple[tuple[str, ...], tuple[SplitParameter, ...], str | None]:
        """Parameters that are read between columns and rows, needed whole or in part; or why one of them cannot be."""
        own = {
            id(parameter)
            for name in self._names((*producers, *consumers))
            for parameter in self.linears[name].module._parameters.values()
        }
        same_rows = {self.run.calls[consumer].owner for consumer in consumers}
        outside = self.returned
        for index, mask in enumerate(self.consumed):
            if self.run.calls[index].owner not in same_rows:
                outside |= mask
        bits = {self.parameter_names[id(parameter)]: bit for bit, parameter in self.parameter_of_bit.items()}
        partial: list[str] = []
        shards: list[SplitParameter] = []
        for name, sets in self._parameter_needs(producers, consumers).items():
            if id(self.parameters[name]) in own:
                continue
            splits = [(dim, split_of(indices)) for dim, indices in enumerate(sets)]
            shard = next((SplitParameter(rows, name, dim) for dim, rows in splits if rows is not None), None)
            if self.returned >> bits[name] & 1 or (shard is None and outside >> bits[name] & 1):
                return (), (), f"the parameter {name} is used inside its group and outside of it"
            if shard is None:
                partial.append(name)
            else:
                shards.append(shard)
        return tuple(partial), tuple(shards), None

    def _shared_inputs(self, producers: list[int]) -> tuple[tuple[str, ...], ...]:
        groups: dict[int, list[str]] = {}
        for producer in producers:
            call = self.run.calls[producer]
            groups.setdefault(id(call.x), []).append(str(call.owner))
        return tuple(tuple(names) for names in groups.values())

    def _drop_inconsistent(self) -> None:
        """A linear that is called again must be called in the same group of the same linears each time."""
        called = Counter(call.owner for call in self.run.calls)
        for candidate in list(self.candidates):
            expected = Counter(itertools.chain(candidate.rows, *candidate.inputs))
            for name, calls in expected.items():
                if called[name] != calls * self.occurrences[id(candidate)]:
                    self._drop(candidate, f"{name} is called {called[name]} times, and not in the same group each time")
                    break

    def _drop_unequal_uses(self) -> None:
        """A parameter that several regions split must be split alike in all of them, and used nowhere else."""
        while True:
            uses: dict[str, set[tuple[SplitParameter, ...]]] = {}
            readers: dict[str, set[str]] = {}
            for candidate in self.candidates:
                for shard in candidate.shards:
                    uses.setdefault(shard.parameter, set()).add((shard,))
                    readers.setdefault(shard.parameter, set()).update(candidate.rows)
            bad = next(
                (name for name in uses if len(uses[name]) > 1 or self._read_by_others(name, readers[name])), None
            )
            if bad is None:
                return
            for candidate in list(self.candidates):
                if any(shard.parameter == bad for shard in candidate.shards):
                    self._drop(candidate, f"the parameter {bad} is used inside its group and outside of it")

    def _read_by_others(self, parameter: str, readers: set[str]) -> bool:
        bit = next(b for b, p in self.parameter_of_bit.items() if p is self.parameters[parameter])
        return any(
            mask >> bit & 1 and self.run.calls[index].owner not in readers for index, mask in enumerate(self.consumed)
        )

    def _drop(self, candidate: Candidate, reason: str) -> None:
        self.candidates.remove(candidate)
        self.reasons.update(dict.fromkeys(candidate.members, reason))


def _common_calls(calls: list[LinearCall]) -> tuple[ModuleCall, ...]:
    common: list[ModuleCall] = []
    for level in zip(*(call.stack for call in calls), strict=False):
        if any(entry is not level[0] for entry in level):
            break
        common.append(level[0])
    return tuple(common)


def outputs_of(run: Run) -> list[Tensor]:
    """What the run returns; where that is no tensor (a validation step), what its outermost modules return."""
    outputs = list(tensors_in(run.outputs)) or list(tensors_in(run.outermost))
    if not outputs:
        raise ParallelConfigError(
            "The model returns no tensor in the run that plans its split, so nothing shows what is computed from it. "
            "Return the loss from the step, or set example_input_array on the LightningModule."
        )
    return outputs


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
