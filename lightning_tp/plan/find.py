"""Find a plan: probe the model, localize and prove every candidate, replicate the rest."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_tp.errors import ParallelConfigError, PlanError
from lightning_tp.plan.compare import NotProven
from lightning_tp.plan.own_products import OwnProducts, boundary_regions, own_products
from lightning_tp.plan.probe import Candidate, Misfit, Probe, SplittableLinear, probe
from lightning_tp.plan.prove import RegionProof
from lightning_tp.plan.sharding_plan import (
    ArgumentSlice,
    AttributeChange,
    Region,
    Replicated,
    ShardingPlan,
    SizeRule,
)
from lightning_tp.plan.state import module_state_kept, random_state_kept
from lightning_tp.plan.trace import attribute_names

Unsplittable = Literal["error", "replicate"]

_LARGEST_CHANGE = 4
_MOST_TRIALS = 400


def find_plan(
    model: nn.Module,
    example_inputs: Any,
    tensor_parallel_size: int,
    *,
    styles: Mapping[str, str] | None = None,
    unsplittable: Unsplittable = "error",
) -> ShardingPlan:
    """Find what of ``model`` can be split over ``tensor_parallel_size`` ranks, and prove it.

    The model is run in training mode with randomness switched off. Its parameters, gradients, buffers and other
    state, and all random state, are afterwards what they were.

    Args:
        model: Any module; its parameters must hold values.
        example_inputs: A tensor, a tuple of arguments, a dict of keyword arguments, or a callable without arguments
            that runs the model and returns what is computed from it.
        tensor_parallel_size: Ranks that share the model.
        styles: Module name patterns (``*`` matches anything) to "column", "row" or "replicate". If given, only
            linears matched as column or row are split, and each of them must be.
        unsplittable: What to do with linears that other sizes could split but not this one.

    Raises:
        ParallelConfigError: the model does not run, or (``unsplittable="error"``) the size does not fit it.
        PlanError: a pattern of ``styles`` matches nothing or cannot be followed.
    """
    started = time.perf_counter()
    _check_model(model)
    run = _runner(model, example_inputs)
    with random_state_kept(), module_state_kept(model), _training_with_gradients(model):
        with randomised_parameters(model):
            try:
                found = probe(model, run, tensor_parallel_size)
            except ParallelConfigError:
                raise
            except Exception as error:
                raise ParallelConfigError(
                    f"The model could not be run once to plan its split: {type(error).__name__}: {error}. "
                    "Check the example input, or give the strategy a saved plan."
                ) from error
        if styles is not None:
            _restrict(found, styles)
        regions = _regions(model, found, tensor_parallel_size, run)
        own = own_products(model, found, regions)
        boundaries, misfits = boundary_regions(model, found, own, tensor_parallel_size, styles)
        misfits = [*found.misfits, *misfits]
        if misfits and styles is None and unsplittable == "error":
            raise ParallelConfigError(_misfit_message(misfits, tensor_parallel_size))
        regions += boundaries
    if styles is not None:
        _check_styles_followed(found, styles, regions)
    return _plan(model, found, own, regions, tensor_parallel_size, time.perf_counter() - started)


def _plan(
    model: nn.Module, found: Probe, own: OwnProducts, regions: list[Region], size: int, seconds: float
) -> ShardingPlan:
    split = {name for region in regions for name in (*(column.module for column in region.columns), *region.rows)}
    shards = {shard.parameter for region in regions for shard in region.shards}
    parameters = dict(model.named_parameters())
    by_hand = {f"{name}.{key}" for name, linear in found.linears.items() for key in linear.module._parameters}
    whole = [
        Replicated(name, linear.parameters, found.reasons.get(name, "not split"))
        for name, linear in found.linears.items()
        if name not in split and f"{name}.weight" not in shards
    ]
    others = {name: reason for name, reason in own.reasons.items() if name not in by_hand}
    whole += [
        Replicated(name, parameters[name].numel(), reason) for name, reason in others.items() if name not in shards
    ]
    sharded_columns = [
        found.linears[column.module].parameters for region in regions for column in region.columns if column.is_sharded
    ]
    rows = [found.linears[row].weight.numel() for region in regions for row in region.rows]
    return ShardingPlan(
        tensor_parallel_size=size,
        regions=tuple(sorted(regions, key=lambda region: found.order(region.module))),
        replicated=tuple(whole),
        split_parameters=sum(sharded_columns) + sum(rows) + sum(parameters[name].numel() for name in shards),
        matmul_parameters=sum(linear.parameters for linear in found.linears.values())
        + sum(parameters[name].numel() for name in others),
        found_in_seconds=round(seconds, 3),
    )


def _check_model(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ParallelConfigError(f"{name} is a lazy parameter: run the model once before it is split.")
        if parameter.is_meta:
            raise ParallelConfigError(f"{name} is on the meta device: give it values before the model is split.")
        if type(parameter) is not nn.Parameter:
            raise ParallelConfigError(
                f"{name} is a {type(parameter).__name__}: the model is already parallelized or quantized. "
                "Give the strategy the plain model."
            )


def _runner(model: nn.Module, example_inputs: Any) -> Callable[[], Any]:
    if isinstance(example_inputs, Tensor):
        return lambda: model(example_inputs)
    if isinstance(example_inputs, Mapping):
        return lambda: model(**example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return lambda: model(*example_inputs)
    if callable(example_inputs):
        return example_inputs
    raise ParallelConfigError(
        "example_inputs must be a tensor, a tuple of arguments, a dict of keyword arguments or a callable that runs "
        f"the model, not {type(example_inputs).__name__}."
    )


@contextmanager
def _training_with_gradients(model: nn.Module) -> Iterator[None]:
    """Frozen parameters count as well: they may be unfrozen later."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        for parameter in frozen:
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        with torch.enable_grad():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for module, training in modes:
            module.training = training


@contextmanager
def randomised_parameters(model: nn.Module) -> Iterator[None]:
    """Small vectors (biases, gains, scales) stand at random values: a zero among them would hide what depends on it."""
    generator = torch.Generator().manual_seed(0)
    changed: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    stand_ins: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None or parameter.dim() > 1 or not parameter.is_floating_point():
                continue
            if id(parameter) not in stand_ins:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                stand_ins[id(parameter)] = nn.Parameter(parameter.detach() + 0.1 * noise)
            changed.append((module._parameters, key, parameter))
    try:
        for parameters, key, parameter in changed:
            parameters[key] = stand_ins[id(parameter)]
        yield
    finally:
        for parameters, key, parameter in changed:
            parameters[key] = parameter


def _regions(model: nn.Module, found: Probe, size: int, run: Callable[[], Any]) -> list[Region]:
    """The candidates that can be proven, in the order of the run; the others get a reason."""
    regions: list[Region] = []
    hints = _Hints()
    alone = {id(c): _proven(model, found, [c], size, run, hints) for c in found.candidates}
    for candidates in _proven_together(found.candidates, alone):
        proven = [alone[id(candidate)] for candidate in candidates]
        linked = len({candidate.call.name if candidate.call else "" for candidate in candidates}) > 1
        handed = any(not _reads_only_its_own(candidate) for candidate in candidates)
        if linked or handed or any(isinstance(way, _Way) and way.conditional for way in proven):
            proven = _proven_linked(model, found, candidates, proven, size, run)
        elif len(candidates) > 1 and any(isinstance(way, str) or way.changes_code for way in proven):
            # Changes for one region reach the code of the others in the same module: they are proven together.
            together = _proven(model, found, candidates, size, run, hints)
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
                misfit = None if candidate.is_complete else candidate.misfit()
                if misfit is not None and size not in misfit.legal_sizes:
                    found.misfits.append(misfit)
                    way = misfit.reason(size)
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
    try:
        proof = RegionProof(model, found.linears, _merged(candidates), size, run)
        verdict = proof.check(attributes)
        if verdict.results_differ:
            raise NotProven("what their module returns would differ on one rank")
    except NotProven as error:
        return [f"with the modules to which it hands on what belongs to its heads: {error}"] * len(candidates)
    except Exception as error:
        reason = f"with the modules to which it hands on what belongs to its heads: {type(error).__name__}: {error}"
        return [reason] * len(candidates)
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
        failures: Class and shapes of the modules in which no way was found.
    """

    ways: dict[type, tuple[tuple[tuple[str, AttributeChange], ...], bool]] = field(default_factory=dict)
    failures: set[tuple[Any, ...]] = field(default_factory=set)


def _proven(
    model: nn.Module, found: Probe, candidates: list[Candidate], size: int, run: Callable[[], Any], hints: _Hints
) -> _Way | str:
    """A way in which all ``candidates`` (of one module) are proven together, or why there is none."""
    candidate = candidates[0] if len(candidates) == 1 else _merged(candidates)
    try:
        proof = RegionProof(model, found.linears, candidate, size, run)
        proof.slice_arguments()
    except NotProven as error:
        return str(error)
    except Exception as error:
        return f"its module does not run by itself: {type(error).__name__}: {error}"
    last = "no share of its code fits"
    conditional: _Way | None = None
    ways = _ways(model, candidate, proof, found.linears)
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
            verdict = proof.check(attributes, rescale)
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


def _misfit_message(misfits: list[Misfit], size: int) -> str:
    legal = set(misfits[0].legal_sizes)
    for misfit in misfits:
        legal &= set(misfit.legal_sizes)
    shown = [f"{', '.join(m.columns)} -> {', '.join(m.rows)}: {list(m.legal_sizes)}" for m in misfits[:4]]
    more = f" (and {len(misfits) - 4} more)" if len(misfits) > 4 else ""
    return (
        f"tensor_parallel_size={size} does not fit this model: attention heads or features of some linears are not "
        f"divisible by it. Legal sizes: {sorted(legal)}. Limited by: {'; '.join(shown)}{more}. Change "
        'tensor_parallel_size, or pass unsplittable="replicate" to keep these linears whole on every rank.'
    )


def _style_of(name: str, styles: Mapping[str, str]) -> str | None:
    return next((style for pattern, style in styles.items() if fnmatchcase(name, pattern)), None)


def _restrict(found: Probe, styles: Mapping[str, str]) -> None:
    """Keep the candidates that ``styles`` asks for."""
    unknown = sorted({style for style in styles.values()} - {"column", "row", "split", "replicate"})
    if unknown:
        raise PlanError(f'Unknown style {unknown[0]!r} in the plan. Legal: "column", "row", "split", "replicate".')
    for pattern, style in styles.items():
        names = found.run.module_calls if style == "split" else found.linears
        if not any(fnmatchcase(name, pattern) for name in names):
            kind = "module" if style == "split" else "linear"
            near = ", ".join(list(names)[:8])
            raise PlanError(
                f"The pattern {pattern!r} of the plan matches no {kind} of the model. Its {kind}s are: {near}"
                f"{', ...' if len(names) > 8 else ''}. Change the pattern, or leave it out."
            )
    for candidate in list(found.candidates):
        roles = {column.module: "column" for column in candidate.columns} | dict.fromkeys(candidate.rows, "row")
        if any(_style_of(name, styles) != role for name, role in roles.items()):
            found.candidates.remove(candidate)
            for name in roles:
                found.reasons[name] = "the given plan does not split its group"


def _check_styles_followed(found: Probe, styles: Mapping[str, str], regions: list[Region]) -> None:
    columns = {column.module for region in regions for column in region.columns}
    rows = {row for region in regions for row in region.rows}
    for name in found.linears:
        style = _style_of(name, styles)
        if (style == "column" and name not in columns) or (style == "row" and name not in rows):
            raise PlanError(
                f"The plan asks for {name} as {style}, but that split was not found or not proven: "
                f"{found.reasons.get(name, 'it has another role')}. Change the plan for {name}."
            )
