"""Why one module or parameter is split as it is, or not."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from lightning_tp.inspection.folding import labels
from lightning_tp.inspection.roles import Role
from lightning_tp.inspection.subject import InspectError, near_misses
from lightning_tp.inspection.summary import place
from lightning_tp.plan.compare import TOLERANCE
from lightning_tp.plan.sharding_plan import Ranges, Region, ShardingPlan, Split

_RANGES_SHOWN, _RANKS_SHOWN = 3, 8


@dataclass(frozen=True)
class Explanation:
    """What there is to say of one module or parameter: a heading for each fact, and the fact."""

    name: str
    facts: dict[str, str]


def explain(pattern: str, model: nn.Module, plan: ShardingPlan, roles: dict[str, Role]) -> list[Explanation]:
    """One explanation for each module and parameter whose name ``pattern`` matches (``*`` matches anything).

    Raises:
        InspectError: no name matches; the message has those that resemble it.
    """
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    matching = [name for name in (*modules, *roles) if name == pattern or fnmatchcase(name, pattern)]
    if not matching:
        raise InspectError(
            f"--why {pattern}: no module or parameter has this name.{near_misses(pattern, [*modules, *roles])} "
            "`*` matches anything."
        )
    return [
        _of_module(name, modules[name], plan, roles) if name in modules else _of_parameter(name, model, plan, roles)
        for name in matching
    ]


def _of_parameter(name: str, model: nn.Module, plan: ShardingPlan, roles: dict[str, Role]) -> Explanation:
    parameter = model.get_parameter(name)
    owner = model.get_submodule(name.rpartition(".")[0])
    facts = {"class": f"parameter of {type(owner).__name__}", "shape": str(list(parameter.shape))}
    twins = [other for other, tensor in model.named_parameters(remove_duplicate=False) if tensor is parameter]
    if len(twins) > 1:
        facts["tied to"] = ", ".join(twin for twin in twins if twin != name)
    return Explanation(name, {**facts, **_of_role(roles[name], plan)})


def _of_module(name: str, module: nn.Module, plan: ShardingPlan, roles: dict[str, Role]) -> Explanation:
    facts = {"class": type(module).__name__}
    own = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    facts |= {f"shape of {key}": str(list(parameter.shape)) for key, parameter in own.items()}
    reads = [region for region in plan.regions if any(entry.module == name for entry in region.entries)]
    if own:
        main = "weight" if "weight" in own else next(iter(own))
        facts |= _of_role(roles[f"{name}.{main}"], plan)
        for key in own:
            role = roles[f"{name}.{key}"]
            if key != main and role.kind != roles[f"{name}.{main}"].kind:
                facts[f"role of {key}"] = f"{_role_in_words(role, plan)}" + (f": {role.reason}" if role.reason else "")
    if reads:
        facts["entry"] = (
            f"part of its output enters {labels(map(place, reads))[0]} past the columns: the gradients of that part "
            "are summed over the ranks"
        )
    for number, region in enumerate(region for region in plan.regions if place(region) == name):
        suffix = f" {number + 1}" if number else ""
        facts |= {f"{heading}{suffix}": fact for heading, fact in _of_region(region).items()}
    inside = [region for region in plan.regions if place(region).startswith(f"{name}.")]
    whole = [entry.module for entry in plan.replicated if entry.module.startswith(f"{name}.")]
    if inside:
        facts["regions within"] = ", ".join(labels(map(place, inside)))
    if whole:
        facts["whole within"] = ", ".join(labels(whole))
    if not own and not inside and not whole and not any(place(region) == name for region in plan.regions):
        facts["role"] = "nothing of it is split: it holds no matrix that could be"
    return Explanation(name, facts)


def _of_role(role: Role, plan: ShardingPlan) -> dict[str, str]:
    facts = {"role": _role_in_words(role, plan)}
    if role.reason and role.kind != "partial":
        facts["reason"] = role.reason
    if role.region is not None:
        if role.split is not None:
            facts["indices"] = _indices(role.split)
        facts |= _of_region(role.region)
    return facts


def _role_in_words(role: Role, plan: ShardingPlan) -> str:
    where = f" of region {place(role.region) or '(root)'}" if role.region is not None else ""
    if role.kind == "row":
        size = plan.tensor_parallel_size
        return f"row{where}: split along dim {role.dim} into {size} equal parts, one a rank"
    if role.split is not None:
        kind = "column" if role.kind == "column" else "split parameter"
        if role.is_sharded:
            return f"{kind}{where}: split along dim {role.dim}"
        return f"{kind}{where}: whole on every rank, which reads its part along dim {role.dim}; gradients are summed"
    if role.kind == "partial":
        return f"whole on every rank, read within{where.removeprefix(' of')}: gradients are summed over the ranks"
    return f"whole on every rank{where}"


def _of_region(region: Region) -> dict[str, str]:
    facts = {}
    groups = [", ".join(names) for names in region.inputs]
    if groups:
        facts["columns by input"] = "; ".join(groups)
    if region.shards:
        facts["split parameters"] = ", ".join(shard.parameter for shard in region.shards)
    if region.rows:
        facts["rows"] = ", ".join(region.rows)
    if region.boundary is not None:
        facts["edges"] = (
            f"the arguments of {region.module or 'the model'} are copied in ({region.boundary.inputs} with gradients), "
            f"and what it returns is summed ({region.boundary.outputs})"
        )
    if region.entries:
        facts["entries"] = ", ".join(entry.module for entry in region.entries)
    if region.partial:
        facts["gradients summed"] = ", ".join(region.partial)
    if region.norms:
        facts["norms over split features"] = ", ".join(region.norms)
    if region.arguments:
        facts["arguments cut"] = ", ".join(f"{cut.argument} along dim {cut.dim}" for cut in region.arguments)
    facts["rule"] = _rule(region)
    double, single = TOLERANCE[torch.float64], TOLERANCE[torch.float32]
    facts["proof"] = (
        f"largest relative difference {region.error:.0e}; tolerance {double:.0e} in float64, {single:.0e} where the "
        "code has no float64"
    )
    return facts


def _rule(region: Region) -> str:
    if region.found_by == "attributes":
        changes = ", ".join(f"{c.module}.{c.attribute}={c.value}".lstrip(".") for c in region.attributes)
        return f"attributes: while the region runs, {changes}"
    if region.found_by == "sizes":
        functions = ", ".join(dict.fromkeys(rule.function for rule in region.sizes if rule.factor > 1))
        return f"sizes: those that the code names are divided in its calls of {functions}"
    if region.found_by == "adapter":
        return "adapter: the library's own code for one rank's share of this class"
    return "as is: the code fits one rank's share without a change"


def _indices(split: Split) -> str:
    shown = [f"rank {rank}: {_ranges(ranges)}" for rank, ranges in enumerate(split.rows[:_RANKS_SHOWN])]
    more = len(split.rows) - _RANKS_SHOWN
    return "; ".join(shown) + (f"; and {more} more ranks" if more > 0 else "")


def _ranges(ranges: Ranges) -> str:
    shown = [f"{start}-{stop - 1}" for start, stop in ranges[:_RANGES_SHOWN]]
    more = len(ranges) - _RANGES_SHOWN
    return ", ".join(shown) + (f" and {more} more ranges" if more > 0 else "")
