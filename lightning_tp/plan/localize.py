"""Localize: how a candidate's own code runs on one rank's share, each way judged by its proof."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from lightning_tp.plan.candidate import Candidate, Fit, Probe
from lightning_tp.plan.compare import NotProven
from lightning_tp.plan.linears import SplittableLinear
from lightning_tp.plan.prove import RegionProof
from lightning_tp.plan.sharding_plan import ArgumentSlice, AttributeChange, Region, SizeRule
from lightning_tp.plan.trace import attribute_names

_LARGEST_CHANGE = 4
"""Integers that are changed at once, at most."""
_MOST_TRIALS = 400


Given = Mapping[int, Region]
"""By id of a candidate: the region that a plan makes of it."""


def localize(
    model: nn.Module, found: Probe, size: int, run: Callable[[], Any], given: Given | None = None
) -> list[Region]:
    """The candidates that can be proven, in the order of the run; the others get a reason.

    With ``given``, each candidate's code is changed as that region says, and in no other way.
    """
    regions: list[Region] = []
    hints = _Hints()
    given = given or {}
    alone = {id(c): _proven_as_before(model, found, c, size, run, hints, given.get(id(c))) for c in found.candidates}
    for candidates in _proven_together(found.candidates, alone):
        proven = [alone[id(candidate)] for candidate in candidates]
        linked = len({candidate.call.name if candidate.call else "" for candidate in candidates}) > 1
        handed = any(not _reads_only_its_own(candidate) for candidate in candidates)
        if linked or handed or any(isinstance(way, _Way) and way.conditional for way in proven):
            proven = _proven_linked(model, found, candidates, proven, size, run)
        elif len(candidates) > 1 and any(isinstance(way, str) or way.changes_code for way in proven):
            # Changes for one region reach the code of the others in the same module: they are proven together.
            together = _proven(model, found, candidates, size, run, hints, given.get(id(candidates[0])))
            if isinstance(together, _Way):
                proven = [together] * len(candidates)
            else:
                proven = [
                    way
                    if isinstance(way, str) or way.found_by == "as is"
                    else f"with the rest of its module: {together}"
                    for way in proven
                ]
        for candidate, way in zip(candidates, proven, strict=True):
            if isinstance(way, _Way) and way.conditional:
                way = "what its module returns beside its rows' outputs would differ on one rank"
            if isinstance(way, str):
                legal = (1,) if candidate.is_complete else candidate.legal_sizes()
                if len(legal) > 1 and size not in legal:
                    columns = tuple(column.module for column in candidate.columns)
                    found.misfits.append(Fit(columns, candidate.rows, legal))
                    way = found.misfits[-1].reason(size)
                for name in candidate.members:
                    found.reasons[name] = way
                continue
            regions.append(
                Region(
                    module="" if candidate.call is None else candidate.call.name,
                    columns=candidate.columns,
                    rows=candidate.rows,
                    inputs=candidate.inputs,
                    partial=candidate.partial,
                    shards=candidate.shards,
                    entries=candidate.entries,
                    random=candidate.random,
                    **{**way.fields, "norms": tuple(n for n in way.norms if n in candidate.norms)},
                )
            )
    return regions


def _proven_together(candidates: list[Candidate], alone: Mapping[int, _Way | str]) -> list[list[Candidate]]:
    """The candidates in groups: those of one module, those that split the same parameter, and those of like modules
    if what one of them returns is right only together with others."""
    conditional = {
        _kind(candidate)
        for candidate in candidates
        for way in [alone[id(candidate)]]
        if isinstance(way, _Way) and way.conditional
    }
    groups: list[tuple[set[str], list[Candidate]]] = []
    for candidate in candidates:
        keys = {f"module {candidate.call.name if candidate.call else ''}"}
        keys |= {f"parameter {shard.parameter}" for shard in candidate.shards}
        if _kind(candidate) in conditional:
            keys.add(f"kind {_kind(candidate)}")
        joined = [group for group in groups if group[0] & keys]
        groups = [group for group in groups if not group[0] & keys]
        members = [member for _, group in joined for member in group] + [candidate]
        groups.append((keys.union(*(names for names, _ in joined)), members))
    return [members for _, members in groups]


def _kind(candidate: Candidate) -> str:
    """Class and last name of a candidate's module, which are those of its likes in other layers."""
    call = candidate.call
    return "" if call is None else f"{type(call.module).__qualname__} {call.name.rpartition('.')[2]}"


def _proven_linked(
    model: nn.Module,
    found: Probe,
    candidates: list[Candidate],
    alone: list[_Way | str],
    size: int,
    run: Callable[[], Any],
) -> list[_Way | str]:
    """Regions of several modules of which one hands on to others what belongs to its heads: proven in the module that
    holds them all, where no argument is cut."""
    failed = next((way for way in alone if isinstance(way, str)), None)
    ways = [way for way in alone if isinstance(way, _Way)]
    if failed is not None or any(way.sizes for way in ways):
        return [failed or "its code needs other sizes, and it shares a parameter with other modules"] * len(candidates)
    attributes = tuple(dict.fromkeys(change for way in ways for change in way.attributes))
    where = "with the modules to which it hands on what belongs to its heads: " if len(candidates) > 1 else ""
    try:
        proof = RegionProof(model, found, _merged(candidates), size, run)
        verdict = proof.prove(attributes)
        if verdict.results_differ:
            raise NotProven("what their module returns beside their rows' outputs would differ on one rank")
    except NotProven as error:
        return [f"{where}{error}"] * len(candidates)
    except Exception as error:
        return [f"{where}{type(error).__name__}: {error}"] * len(candidates)
    return [replace(way, arguments=(), error=verdict.error, norms=verdict.norms, conditional=False) for way in ways]


def _reads_only_its_own(candidate: Candidate) -> bool:
    """Whether every parameter that a region splits is one of its module's."""
    name = candidate.call.name if candidate.call is not None else ""
    return not name or all(shard.parameter.startswith(f"{name}.") for shard in candidate.shards)


def _merged(candidates: list[Candidate]) -> Candidate:
    """All candidates as one, in the innermost module call that holds them all and the parameters that they split."""
    shards = tuple(dict.fromkeys(shard for candidate in candidates for shard in candidate.shards))
    common = [
        level[0]
        for level in zip(*(candidate.stack for candidate in candidates), strict=False)
        if all(call is level[0] for call in level)
        and (not level[0].name or all(shard.parameter.startswith(f"{level[0].name}.") for shard in shards))
    ]
    return replace(
        candidates[0],
        columns=tuple(column for candidate in candidates for column in candidate.columns),
        rows=tuple(row for candidate in candidates for row in candidate.rows),
        partial=tuple(dict.fromkeys(name for candidate in candidates for name in candidate.partial)),
        shards=shards,
        entries=tuple(dict.fromkeys(entry for candidate in candidates for entry in candidate.entries)),
        norms=tuple(dict.fromkeys(name for candidate in candidates for name in candidate.norms)),
        stack=tuple(common),
    )


@dataclass(frozen=True)
class _Way:
    """A proven way to run a region's code on one rank's share; the fields are those of :class:`Region`."""

    attributes: tuple[AttributeChange, ...]
    sizes: tuple[SizeRule, ...]
    arguments: tuple[ArgumentSlice, ...]
    norms: tuple[str, ...]
    found_by: str
    error: float
    conditional: bool = False
    """What the module returns beside its rows' outputs is that of one rank: right only if others read it so."""

    @property
    def fields(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "conditional"}

    @property
    def changes_code(self) -> bool:
        """Whether other code of the module would see that it is in force."""
        return bool(self.attributes or self.sizes or self.arguments)


@dataclass
class _Hints:
    """What other modules of a class have shown.

    Attributes:
        ways: By class the last proven way: changes with the module's name within it, and whether to rescale sizes.
        proven: By what a module computes and what is split in it: the way, and the module for which it was proven.
        failures: Class and shapes of the modules in which no way was found.
    """

    ways: dict[type, tuple[tuple[tuple[str, AttributeChange], ...], bool]] = field(default_factory=dict)
    proven: dict[Any, tuple[_Way | str, str]] = field(default_factory=dict)
    failures: set[tuple[Any, ...]] = field(default_factory=set)


def _proven_as_before(
    model: nn.Module,
    found: Probe,
    candidate: Candidate,
    size: int,
    run: Callable[[], Any],
    hints: _Hints,
    given: Region | None,
) -> _Way | str:
    """:func:`_proven` for one candidate; for repeated blocks the proof of the first one holds."""
    call = candidate.call
    if call is None or not call.name:
        return _proven(model, found, [candidate], size, run, hints, given)
    asked = None
    if given is not None:
        changes = ((_moved(c.module, call.name, ""), c.attribute, c.value) for c in given.attributes)
        asked = (bool(given.sizes), *changes)
    key = (found.run.kind(call), _placed(candidate, call.name, ""), asked)
    if key in hints.proven:
        way, module = hints.proven[key]
        if isinstance(way, str):
            return way
        moved = tuple(replace(c, module=_moved(c.module, module, call.name)) for c in way.attributes)
        if [_attribute(model, change) for change in moved] == [_attribute(model, change) for change in way.attributes]:
            norms = tuple(_moved(name, module, call.name) for name in way.norms)
            return replace(way, attributes=moved, norms=norms)
    way = _proven(model, found, [candidate], size, run, hints, given)
    hints.proven[key] = (way, call.name)
    return way


def _moved(name: str, old: str, new: str) -> str:
    """``name`` with the module ``old`` at its start replaced by ``new``; names of other modules stay."""
    if name == old or name.startswith(f"{old}."):
        return f"{new}{name[len(old) :]}" if new else name[len(old) + 1 :]
    return name


def _placed(candidate: Candidate, old: str, new: str) -> Any:
    """What of a candidate decides how it is run, with its module's name replaced."""

    def names(values: Iterable[str]) -> tuple[str, ...]:
        return tuple(_moved(value, old, new) for value in values)

    return (
        tuple((*names([column.module]), column.rows) for column in candidate.columns),
        names(candidate.rows),
        tuple(map(names, candidate.inputs)),
        names(candidate.partial),
        tuple((*names([shard.parameter]), shard.dim, shard.rows) for shard in candidate.shards),
        tuple((*names([entry.module]), entry.rows) for entry in candidate.entries),
        names(candidate.norms),
    )


def _attribute(model: nn.Module, change: AttributeChange) -> Any:
    """The value that an attribute has in the unsplit model; None where there is none."""
    holder, _, name = change.attribute.rpartition(".")
    attributes = vars(model.get_submodule(change.module))
    return attributes.get(name) if not holder else getattr(attributes.get(holder), name, None)


def _proven(
    model: nn.Module,
    found: Probe,
    candidates: list[Candidate],
    size: int,
    run: Callable[[], Any],
    hints: _Hints,
    given: Region | None,
) -> _Way | str:
    """A way in which all ``candidates`` (of one module) are proven together, or why there is none."""
    candidate = candidates[0] if len(candidates) == 1 else _merged(candidates)
    try:
        proof = RegionProof(model, found, candidate, size, run)
        proof.slice_arguments()
    except NotProven as error:
        return str(error)
    except Exception as error:
        return f"its module does not run by itself: {type(error).__name__}: {error}"
    last = "no share of its code fits"
    conditional: _Way | None = None
    ways = _ways(model, candidate, proof, found.linears)
    if given is not None:
        ways, hints = iter([(given.attributes, bool(given.sizes))]), _Hints()
    kind = (type(proof.module), tuple(tuple(p.shape) for _, _, p in proof.slots), len(candidate.columns))
    if kind in hints.failures:
        ways = iter([((), False), ((), True)])
    hint = hints.ways.get(type(proof.module))
    if hint is not None:
        # What fitted another block of this kind is tried first, and proven for this one.
        moved = tuple(replace(change, module=proof.within(name)) for name, change in hint[0])
        ways = itertools.chain([(moved, hint[1])], ways)
    for attributes, rescale in ways:
        if conditional is not None and len(attributes) > len(conditional.attributes):
            continue
        try:
            verdict = proof.prove(attributes, rescale)
        except NotProven as failure:
            last = str(failure)
            continue
        except Exception as failure:
            first_line = (str(failure).splitlines() or [""])[0]
            last = f"{type(failure).__name__}: {first_line}"[:160]
            continue
        sizes = verdict.rules if any(rule.factor > 1 for rule in verdict.rules) else ()
        found_by = "sizes" if sizes else "attributes" if attributes else "as is"
        way = _Way(attributes, sizes, proof.arguments, verdict.norms, found_by, verdict.error, verdict.results_differ)
        if not way.conditional:
            hints.ways[type(proof.module)] = (tuple((proof.relative(c.module), c) for c in attributes), rescale)
            return way
        conditional = conditional or way
    if conditional is not None:
        return conditional
    hints.failures.add(kind)
    return f"one rank's share could not be proven equal: {last}"


def _ways(
    model: nn.Module, candidate: Candidate, proof: RegionProof, linears: Mapping[str, SplittableLinear]
) -> Iterator[tuple[tuple[AttributeChange, ...], bool]]:
    """Ways to run the region's code on one rank's share, simplest first."""
    yield (), False
    if candidate.call is None:
        return
    changes = _attribute_changes(model, candidate, proof, linears)
    trials = 1
    for number in range(1, _LARGEST_CHANGE + 1):
        for chosen in itertools.combinations(changes, number):
            if len({(change.module, change.attribute) for change in chosen}) < number:
                continue
            if trials == _MOST_TRIALS:
                break
            trials += 1
            yield chosen, False
    yield (), True


def _attribute_changes(
    model: nn.Module, candidate: Candidate, proof: RegionProof, linears: Mapping[str, SplittableLinear]
) -> list[AttributeChange]:
    """Integers of the region's modules (or of their configuration objects) that may count what is split."""
    size = proof.size
    factors = {size}
    for column in candidate.columns:
        whole, share = linears[column.module].output_features, len(column.row_indices(0))
        if whole % share == 0:
            factors.add(whole // share)
        if column.overlaps:
            factors |= {divisor for divisor in range(2, size) if size % divisor == 0}
    mentioned: list[AttributeChange] = []
    others: list[AttributeChange] = []
    for module in proof.module.modules():
        name = proof.names[id(module)]
        if name in linears:
            continue
        words = attribute_names(module)
        for key, value in vars(module).items():
            if key.startswith("_") or key == "training":
                continue
            for attribute, number in _integers(key, value):
                for factor in sorted(factors, reverse=True):
                    if factor > 1 and number > 1 and number % factor == 0:
                        into = mentioned if attribute.rpartition(".")[2] in words else others
                        into.append(AttributeChange(name, attribute, number // factor))
    heads_first = sorted(mentioned, key=lambda change: ("head" not in change.attribute, "." in change.attribute))
    return heads_first + sorted(others, key=lambda change: ("head" not in change.attribute, "." in change.attribute))


def _integers(key: str, value: Any) -> Iterator[tuple[str, int]]:
    if type(value) is int:
        yield key, value
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, type)) and not callable(value):
        for field, entry in vars(value).items():
            if type(entry) is int and not field.startswith("_"):
                yield f"{key}.{field}", entry
