"""Proving a plan that is given: read from a file, written or changed by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lightning_tp.errors import PlanError
from lightning_tp.parallel.apply import check_plan
from lightning_tp.parallel.torch_modules import local_forward
from lightning_tp.plan.analysis import outputs_of
from lightning_tp.plan.boundary import BoundarySplit, Cut
from lightning_tp.plan.candidate import Candidate, Probe
from lightning_tp.plan.compare import NotProven
from lightning_tp.plan.graph import Reach
from lightning_tp.plan.linears import SplittableLinear, splittable_linears
from lightning_tp.plan.localize import localize
from lightning_tp.plan.norms import recognised_norm
from lightning_tp.plan.planning import model_runner, planning
from lightning_tp.plan.sharding_plan import Region, ShardingPlan
from lightning_tp.plan.trace import ModuleCall, Run, traced_run
from lightning_tp.plan.vocabulary import prove_lookup


def prove_plan(model: nn.Module, example_inputs: Any, plan: ShardingPlan) -> None:
    """Prove every region of ``plan`` on ``model``, as :func:`lightning_tp.find_plan` proves what it finds.

    Args:
        model: The plain model; it is afterwards as it was.
        example_inputs: As for :func:`lightning_tp.find_plan`.
        plan: Any plan.

    Raises:
        PlanError: the plan does not fit the model, or the ranks would give other numbers; the message names every
            region for which that is so, and why.
        ParallelConfigError: the model does not run.
    """
    check_plan(model, plan, plan.tensor_parallel_size)
    with planning(model):
        run = model_runner(model, example_inputs)
        linears = splittable_linears(model)
        faults = plan_faults(model, plan, traced_run(model, linears, run), run)
    if faults:
        shown = "; ".join(f"{name or 'the model'}: {fault}" for name, fault in list(faults.items())[:5])
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise PlanError(f'The plan is not proven. {shown}{more}. Find a new one with plan="auto".')


def plan_faults(model: nn.Module, plan: ShardingPlan, traced: Run, run: Callable[[], Any]) -> dict[str, str]:
    """By module: why its region is not proven. The plan has passed ``check_plan``; the model is being planned."""
    called = [region.module for region in plan.regions if region.module]
    missing = {name: "the example does not run it" for name in called if name not in traced.module_calls}
    if missing:
        return missing
    leaving = _leaving_faults(plan, traced)
    if leaving:
        return leaving
    return _boundary_faults(model, plan, traced) | _region_faults(model, plan, splittable_linears(model), traced, run)


def _leaving_faults(plan: ShardingPlan, traced: Run) -> dict[str, str]:
    """Columns whose output leaves the computation: returned, logged, or turned into a number that decides something."""
    reach = Reach([call.y for call in traced.calls])
    mask = 0
    for tensor in (*outputs_of(traced), *traced.observed):
        mask |= reach.of(tensor)
    regions = {column.module: region.module for region, column in plan.columns()}
    left = [call.owner for index, call in enumerate(traced.calls) if mask >> index & 1 and call.owner in regions]
    return {
        regions[name]: f"the output of its column {name} is returned, logged, or decides something" for name in left
    }


def _boundary_faults(model: nn.Module, plan: ShardingPlan, traced: Run) -> dict[str, str]:
    faults: dict[str, str] = {}
    for region in plan.regions:
        if region.vocabulary is not None:
            faults |= _lookup_faults(model, region, traced)
        if region.boundary is None:
            continue
        module = model.get_submodule(region.module)
        function = local_forward(module) if region.found_by == "adapter" else None
        call = traced.module_calls[region.module][0]
        cut = Cut(region.shards, region.partial, region.boundary.once, 0)
        try:
            split = BoundarySplit(model, region.module, call, plan.tensor_parallel_size, function)
            _, boundary = split.prove(cut, region.attributes)
            if boundary != region.boundary:
                faults[region.module] = f"its edges are {boundary}, not {region.boundary}"
            elif region.random != (call.random_calls > 0):
                faults[region.module] = _RANDOM
        except NotProven as fault:
            faults[region.module] = str(fault)
        except Exception as fault:
            faults[region.module] = f"{type(fault).__name__}: {fault}"
    return faults


def _lookup_faults(model: nn.Module, region: Region, traced: Run) -> dict[str, str]:
    assert region.vocabulary is not None
    members = region.vocabulary.members
    try:
        for shard in region.shards:
            others = sorted(traced.readers.get(id(model.get_parameter(shard.parameter)), set()) - set(members))
            if others:
                raise NotProven(f"{others[0] or 'the model'} reads {shard.parameter} past the module that holds it")
        for name in region.vocabulary.embeddings:
            for call in traced.module_calls.get(name, [])[:2]:
                prove_lookup(model, name, call, region.shards[0].rows)
    except NotProven as fault:
        return {region.module: str(fault)}
    return {}


_RANDOM = "the plan is wrong about whether a dropout lies in it"


def _region_faults(
    model: nn.Module,
    plan: ShardingPlan,
    linears: Mapping[str, SplittableLinear],
    traced: Run,
    run: Callable[[], Any],
) -> dict[str, str]:
    given = [region for region in plan.regions if region.boundary is None and region.vocabulary is None]
    candidates = [_candidate(region, traced, model) for region in given]
    found = Probe(dict(linears), candidates, [], {}, traced)
    by_candidate = {id(candidate): region for candidate, region in zip(candidates, given, strict=True)}
    proven = {region.rows: region for region in localize(model, found, plan.tensor_parallel_size, run, by_candidate)}
    faults = {}
    for region in given:
        again = proven.get(region.rows)
        if again is None:
            faults[region.module] = found.reasons.get(region.rows[0], "it has no rows")
            continue
        for name in ("sizes", "arguments", "norms", "inputs", "random"):
            if getattr(again, name) != getattr(region, name):
                faults[region.module] = _RANDOM if name == "random" else f"its {name} are others than the plan says"
    return faults


def _candidate(region: Region, traced: Run, model: nn.Module) -> Candidate:
    calls = traced.calls
    members = {column.module for column in region.columns} | set(region.rows)
    own = [call for call in calls if call.owner in members]
    groups: dict[int, list[str]] = {}
    for call in own:
        if call.owner not in region.rows:
            groups.setdefault(id(call.x), []).append(str(call.owner))
    once = len(own) // max(sum(call.owner == region.rows[0] for call in own), 1)
    first = own[:once]
    names = {id(call.x) for call in first}
    norms = [
        name
        for name, module in model.named_modules()
        if name.startswith(f"{region.module}.") and name in region.norms and recognised_norm(module) is not None
    ]
    return Candidate(
        columns=region.columns,
        rows=region.rows,
        inputs=tuple(tuple(group) for key, group in groups.items() if key in names),
        stack=_stack(region.module, traced),
        partial=region.partial,
        shards=region.shards,
        entries=region.entries,
        norms=tuple(norms),
        random=bool(first) and first[-1].random_before > first[0].random_before,
        legal_sizes=lambda: (1,),
    )


def _stack(module: str, traced: Run) -> tuple[ModuleCall, ...]:
    """The first calls of the module and of all that hold it."""
    parts = module.split(".") if module else []
    names = ["", *(".".join(parts[: end + 1]) for end in range(len(parts)))]
    return tuple(traced.module_calls[name][0] for name in names if name in traced.module_calls)
