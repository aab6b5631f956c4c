"""What the report says of a plan: its regions and what stays whole, with repeated blocks as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_tp.inspection.folding import common_parent, fold, labels, relative, without_indices
from lightning_tp.inspection.roles import Role
from lightning_tp.plan.sharding_plan import Region, ShardingPlan, all_reduces


@dataclass(frozen=True)
class FoldedRegions:
    """Regions of repeated blocks.

    Attributes:
        place: Their modules, ``"layers.{0..3}.mlp"``.
        count: Number of regions.
        columns: What is split over its output features, with other split parameters; "(shared)" stands behind what
            several ranks read together.
        rows: What is split over its input features; for a region without linears, where its results are summed.
        local_code: How the code for one rank was found.
        error: Largest relative difference of the proofs.
        forward: All-reduces of one region forward.
        backward: All-reduces of one region backward.
    """

    place: str
    count: int
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    local_code: str
    error: float
    forward: int
    backward: int


@dataclass(frozen=True)
class FoldedWhole:
    """Modules and parameters that every rank holds whole for one reason.

    Attributes:
        names: Their names, folded.
        parameters: Number of their parameters in all.
        share: Of the parameters of the model, 0 to 1.
        reason: Why they are whole.
    """

    names: tuple[str, ...]
    parameters: int
    share: float
    reason: str


def place(region: Region) -> str:
    """Where a region is: its module; for a region of the root's own code, the module that holds all of its members."""
    return region.module or common_parent([*region.split_names, *region.rows])


def local_code(region: Region) -> str:
    """How the code of a region runs on one rank's share, in words."""
    if region.found_by == "attributes":
        changes = dict.fromkeys(f"{change.attribute}={change.value}" for change in region.attributes)
        return f"attributes {', '.join(changes)}"
    return region.found_by


def folded_regions(plan: ShardingPlan) -> list[FoldedRegions]:
    """The regions of ``plan`` in the order of the run, those of repeated blocks as one."""
    groups: dict[tuple[object, ...], list[Region]] = {}
    for region in plan.regions:
        key = (_columns(region), _rows(region), local_code(region), all_reduces(region))
        groups.setdefault(key, []).append(region)
    found: list[tuple[int, FoldedRegions]] = []
    for regions in groups.values():
        by_place: dict[str, list[Region]] = {}
        for region in regions:
            by_place.setdefault(place(region), []).append(region)
        for folded in fold(by_place):
            members = [region for name in folded.names for region in by_place[name]]
            first = members[0]
            entry = FoldedRegions(
                folded.label or "(root)",
                len(members),
                _columns(first),
                _rows(first),
                local_code(first),
                max(region.error for region in members),
                *all_reduces(first),
            )
            found.append((plan.regions.index(first), entry))
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0])]


def _columns(region: Region) -> tuple[str, ...]:
    inside = place(region)
    split = [*region.columns, *region.shards]
    named = zip(region.split_names, split, strict=True)
    shared = [relative(name, inside) for name, entry in named if not entry.is_sharded]
    names = [relative(name, inside) for name in region.split_names if relative(name, inside) not in shared]
    return (*labels(names), *(f"{name} (shared)" for name in labels(shared)))


def _rows(region: Region) -> tuple[str, ...]:
    if region.boundary is not None:
        return ("sum of its results",)
    if region.vocabulary is not None:
        return tuple(f"{name}: all words gathered" for name in region.vocabulary.heads)
    return tuple(labels(relative(name, place(region)) for name in region.rows))


def folded_whole(model: nn.Module, plan: ShardingPlan, roles: dict[str, Role]) -> list[FoldedWhole]:
    """What every rank holds whole, what is largest first. Tied parameters count once."""
    total = sum(parameter.numel() for parameter in model.parameters())
    groups: dict[str, list[tuple[str, int, str]]] = {}
    seen: set[int] = set()
    named = dict(model.named_parameters())
    for entry in plan.replicated:
        own = [named[entry.module]] if entry.module in named else model.get_submodule(entry.module).parameters()
        seen.update(map(id, own))
        groups.setdefault(without_indices(entry.reason), []).append((entry.module, entry.parameters, entry.reason))
    for name, parameter in model.named_parameters():
        role = roles[name]
        if id(parameter) not in seen and role.dim is None:
            owner = name.rpartition(".")[0]
            whole_module = owner and all(roles[f"{owner}.{key}"].reason == role.reason for key in _own(model, owner))
            label = owner if whole_module else name
            groups.setdefault(without_indices(role.reason), []).append((label, parameter.numel(), role.reason))
    found = []
    for reason, entries in groups.items():
        parameters = sum(number for _, number, _ in entries)
        reasons = {reason for _, _, reason in entries}
        names = tuple(labels(name for name, _, _ in entries))
        found.append(FoldedWhole(names, parameters, parameters / total, reasons.pop() if len(reasons) == 1 else reason))
    return sorted(found, key=lambda entry: -entry.parameters)


def _own(model: nn.Module, module: str) -> Sequence[str]:
    return [key for key, parameter in model.get_submodule(module)._parameters.items() if parameter is not None]
