"""Find a plan: probe the model, localize and prove every candidate, replicate the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any, Literal, get_args

from torch import nn

from lightning_tp.errors import ParallelConfigError, PlanError
from lightning_tp.parallel.apply import check_plan
from lightning_tp.plan.cache import cache_folder, cached_plan, keep_plan, plan_key
from lightning_tp.plan.candidate import Fit, Probe
from lightning_tp.plan.linears import other_linears, splittable_linears
from lightning_tp.plan.localize import localize
from lightning_tp.plan.own_products import OwnProducts, boundary_limits, boundary_regions, own_products
from lightning_tp.plan.planning import check_model, model_runner, planning, randomised_parameters
from lightning_tp.plan.probe import probe
from lightning_tp.plan.recheck import plan_faults
from lightning_tp.plan.sharding_plan import Region, Replicated, ShardingPlan
from lightning_tp.plan.trace import Run, traced_run
from lightning_tp.plan.vocabulary import Vocabularies, VocabularyParallel

Unsplittable = Literal["error", "replicate"]
_STYLES = ("column", "row", "split", "vocabulary", "replicate")


def find_plan(
    model: nn.Module,
    example_inputs: Any,
    tensor_parallel_size: int,
    *,
    styles: Mapping[str, str] | None = None,
    unsplittable: Unsplittable = "error",
    vocabulary_parallel: VocabularyParallel = "auto",
    cache: bool = False,
) -> ShardingPlan:
    """Find what of ``model`` can be split over ``tensor_parallel_size`` ranks, and prove it.

    The model is run in training mode with randomness switched off. Its parameters, gradients, buffers and other
    state, and all random state, are afterwards what they were.

    Args:
        model: Any module. Parameters on the meta device are fine: plans for a model of any size need no memory for
            its weights (:func:`lightning_tp.parameters_on_meta`).
        example_inputs: A tensor, a tuple of arguments, a dict of keyword arguments, or a callable without arguments
            that runs the model and returns what is computed from it.
        tensor_parallel_size: Ranks that share the model; for one there is nothing to split.
        styles: Module name patterns (``*`` matches anything) to "column", "row", "split" (a module at its edges),
            "vocabulary" (an embedding or output head over its words) or "replicate". If given, only what is matched
            is split, and each of it must be.
        unsplittable: What to do with linears that other sizes could split but not this one.
        vocabulary_parallel: Whether embeddings and output heads are split over the vocabulary, even or not: "auto"
            where that pays.
        cache: Whether to look for the plan in the cache folder (:func:`lightning_tp.plan.cache.cache_folder`) and keep
            it there. A plan from there is proven again before it is used.

    Raises:
        ParallelConfigError: the model does not run, or (``unsplittable="error"``) the size does not fit it.
        PlanError: a pattern of ``styles`` matches nothing or cannot be followed.
    """
    options = SearchOptions(unsplittable, vocabulary_parallel, cache)
    return search_plan(model, example_inputs, tensor_parallel_size, styles, options)[0]


@dataclass(frozen=True)
class SearchOptions:
    """The options of :func:`find_plan`."""

    unsplittable: Unsplittable = "error"
    vocabulary_parallel: VocabularyParallel = "auto"
    cache: bool = False


def search_plan(
    model: nn.Module,
    example_inputs: Any,
    size: int,
    styles: Mapping[str, str] | None,
    options: SearchOptions,
    with_legal_sizes: bool = False,
) -> tuple[ShardingPlan, list[int]]:
    """As :func:`find_plan`, and the sizes up to 64 that split what the plan splits, if asked for; 1 is always one."""
    started = time.perf_counter()
    _check_arguments(size, styles, options)
    check_model(model)
    size = int(size)
    if size == 1:
        return ShardingPlan(tensor_parallel_size=1), [1]
    run = model_runner(model, example_inputs)
    with planning(model):
        with randomised_parameters(model):
            try:
                first = traced_run(model, splittable_linears(model), run)
                key = ""
                if options.cache:
                    key = plan_key(model, first, size, styles, options.unsplittable, options.vocabulary_parallel)
                    known = None if with_legal_sizes else _cached(model, key, first, run)
                    if known is not None:
                        return replace(known, found_in_seconds=round(time.perf_counter() - started, 3)), [1]
                found = probe(model, run, size, first)
            except ParallelConfigError:
                raise
            except Exception as error:
                message = f"{type(error).__name__}: {error}".rstrip(".: \n")
                raise ParallelConfigError(
                    f"The model could not be run once to plan its split: {message}. "
                    "Check the example input, or give the strategy a saved plan."
                ) from error
        if styles is not None:
            _restrict(found, styles)
        regions = localize(model, found, size, run)
        own = own_products(model, found, regions)
        boundaries, misfits = boundary_regions(model, found, own, size, styles)
        misfits = [*found.misfits, *misfits]
        regions += boundaries
        refused = bool(misfits) and styles is None and options.unsplittable == "error"
        limits = _limits(model, found, own, regions, size) if refused or with_legal_sizes else []
        if refused:
            raise ParallelConfigError(_misfit_message(misfits, limits, size))
        wanted = None if styles is None else lambda name: _style_of(name, styles) == "vocabulary"
        vocabularies = Vocabularies(model, found, regions, size, options.vocabulary_parallel, wanted)
        regions += vocabularies.regions
        plan = _plan(model, found, own, vocabularies, regions, size, time.perf_counter() - started)
    if styles is not None:
        _check_styles_followed(found, styles, regions, vocabularies)
    if options.cache:
        keep_plan(cache_folder(), key, plan)
    return plan, sorted({*_legal_sizes([*misfits, *limits]), *(() if misfits else (1, size))})


def _cached(model: nn.Module, key: str, first: Run, run: Callable[[], Any]) -> ShardingPlan | None:
    """The plan from the cache, if there is one that is proven for ``model`` as it is."""
    plan = cached_plan(cache_folder(), key)
    if plan is None:
        return None
    try:
        check_plan(model, plan, plan.tensor_parallel_size)
    except PlanError:
        return None
    return None if plan_faults(model, plan, first, run) else plan


def _limits(model: nn.Module, found: Probe, own: OwnProducts, regions: list[Region], size: int) -> list[Fit]:
    """What ``regions`` split, with the sizes that split it."""
    rows = {region.rows for region in regions if region.boundary is None}
    limits = [
        Fit(tuple(column.module for column in candidate.columns), candidate.rows, candidate.legal_sizes())
        for candidate in found.candidates
        if candidate.rows in rows
    ]
    return limits + boundary_limits(model, found, own, regions, size)


def _legal_sizes(limits: list[Fit]) -> set[int]:
    """The sizes that split everything that ``limits`` are about."""
    return set.intersection(*(set(limit.legal_sizes) for limit in limits)) if limits else {1}


def _plan(
    model: nn.Module,
    found: Probe,
    own: OwnProducts,
    vocabularies: Vocabularies,
    regions: list[Region],
    size: int,
    seconds: float,
) -> ShardingPlan:
    split = {name for region in regions for name in (*(column.module for column in region.columns), *region.rows)}
    split |= {name for region in regions if region.vocabulary for name in region.vocabulary.members}
    shards = {shard.parameter for region in regions for shard in region.shards}
    parameters = dict(model.named_parameters())
    reasons = {**found.reasons, **vocabularies.reasons}
    by_hand = {f"{name}.{key}" for name, linear in found.linears.items() for key in linear.module._parameters}
    whole = [
        Replicated(name, linear.parameters, reasons.get(name, "not split"))
        for name, linear in found.linears.items()
        if name not in split and f"{name}.weight" not in shards
    ]
    others = {name: reason for name, reason in own.reasons.items() if name not in by_hand}
    whole += [
        Replicated(name, parameters[name].numel(), reason) for name, reason in others.items() if name not in shards
    ]
    whole += [
        Replicated(name, model.get_submodule(name).weight.numel(), reason, is_table=True)  # type: ignore[operator]
        for name, reason in vocabularies.reasons.items()
        if name not in found.linears
    ]
    listed = {name.rpartition(".")[0] for name in (*others, *shards)}
    unknown = {n: r for n, r in other_linears(model).items() if n not in listed}
    sizes = {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in unknown}
    whole += [Replicated(name, sizes[name], reason) for name, reason in unknown.items()]
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
        + sum(parameters[name].numel() for name in others)
        + sum(sizes.values()),
        found_in_seconds=round(seconds, 3),
    )


def _check_arguments(size: int, styles: Mapping[str, str] | None, options: SearchOptions) -> None:
    if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
        raise ParallelConfigError(f"tensor_parallel_size is a number of ranks, 1 or more, not {size!r}.")
    if options.unsplittable not in get_args(Unsplittable):
        raise ParallelConfigError(f'unsplittable is "error" or "replicate", not {options.unsplittable!r}.')
    if options.vocabulary_parallel not in ("auto", True, False):
        raise ParallelConfigError(f'vocabulary_parallel is "auto", True or False, not {options.vocabulary_parallel!r}.')
    is_mapping = isinstance(styles, Mapping) and all(isinstance(pattern, str) for pattern in styles)
    if styles is not None and not is_mapping:
        raise PlanError(f'styles maps name patterns to styles, as in {{"*.up": "column"}}; it cannot be {styles!r}.')


def _misfit_message(misfits: list[Fit], limits: list[Fit], size: int) -> str:
    """Why ``size`` does not fit: the linears that it does not split, then the others that forbid yet other sizes."""
    fits = _legal_sizes(misfits)
    kinds: dict[tuple[int, ...], list[Fit]] = {}
    for limit in [*misfits, *(limit for limit in limits if not fits <= {*limit.legal_sizes})]:
        kinds.setdefault(limit.legal_sizes, []).append(limit)
    lines = []
    for sizes, alike in kinds.items():
        more = f" (and {len(alike) - 1} more)" if len(alike) > 1 else ""
        lines.append(f"{', '.join((*alike[0].columns, *alike[0].rows))}{more}: {', '.join(map(str, sizes))}")
    return (
        f"tensor_parallel_size={size} does not fit this model: attention heads or features of some linears are not "
        f"divisible by it. Legal sizes: {sorted(_legal_sizes([*misfits, *limits]))}. Limited by: {'; '.join(lines)}. "
        'Change tensor_parallel_size, or pass unsplittable="replicate" to keep these linears whole on every rank.'
    )


def _style_of(name: str, styles: Mapping[str, str]) -> str | None:
    return next((style for pattern, style in styles.items() if fnmatchcase(name, pattern)), None)


def _restrict(found: Probe, styles: Mapping[str, str]) -> None:
    """Keep the candidates that ``styles`` asks for."""
    unknown = sorted(set(styles.values()) - set(_STYLES))
    if unknown:
        raise PlanError(f"Unknown style {unknown[0]!r} in the plan. Legal: {', '.join(map(repr, _STYLES))}.")
    for pattern, style in styles.items():
        names = found.run.module_calls if style in ("split", "vocabulary") else found.linears
        if not any(fnmatchcase(name, pattern) for name in names):
            kind = "linear" if names is found.linears else "module"
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


def _check_styles_followed(
    found: Probe, styles: Mapping[str, str], regions: list[Region], vocabularies: Vocabularies
) -> None:
    columns = {column.module for region in regions for column in region.columns}
    rows = {row for region in regions for row in region.rows}
    modules = {region.module for region in regions if region.boundary is not None}
    words = {name for region in regions if region.vocabulary for name in region.vocabulary.members}
    for name in found.run.module_calls:
        if _style_of(name, styles) == "vocabulary" and name not in words:
            reason = vocabularies.reasons.get(name, "it is no embedding and no output head")
            raise PlanError(f"The plan asks to split the words of {name}, but {reason}. Change the plan for {name}.")
        if _style_of(name, styles) == "split" and name not in modules:
            raise PlanError(
                f"The plan asks to split {name} at its edges, but that was not proven. Change the plan for {name}; "
                "`lightning-tp inspect` shows why."
            )
    for name in found.linears:
        style = _style_of(name, styles)
        if (style == "column" and name not in columns) or (style == "row" and name not in rows):
            raise PlanError(
                f"The plan asks for {name} as {style}, but that split was not found or not proven: "
                f"{found.reasons.get(name, 'it has another role')}. Change the plan for {name}."
            )
