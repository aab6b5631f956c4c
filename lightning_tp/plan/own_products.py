"""Modules that multiply by parameters that no known linear owns, and how they are split."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from lightning_tp.parallel.torch_modules import local_forward
from lightning_tp.plan.boundary import BoundarySplit
from lightning_tp.plan.candidate import Fit, Probe
from lightning_tp.plan.compare import NotProven
from lightning_tp.plan.sharding_plan import AttributeChange, Region

_MOST_PARAMETERS = 64
"""A module with more parameter tensors than this is a whole network; its parts are looked at, not it."""
_MOST_TRIALS = 60
_LARGEST = 100_000_000
"""Elements of a module's parameters that are proven; all gradients of several ranks must be in memory for that."""


@dataclass
class OwnProducts:
    """Parameters that code multiplies by without a known linear.

    Attributes:
        users: By module that multiplies by them: their names.
        reasons: By name of each of them: why it is not split.
    """

    users: dict[str, list[str]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def own_products(model: nn.Module, found: Probe, regions: list[Region]) -> OwnProducts:
    """Collect the parameters that are multiplied by, but are not the weight of a linear that is split or could be."""
    split = {name for region in regions for name in (*(column.module for column in region.columns), *region.rows)}
    known = {id(linear.weight) for name, linear in found.linears.items() if name in split or not found.by_hand(name)}
    names = {id(p): name for name, p in model.named_parameters()}
    shards = {shard.parameter for region in regions for shard in region.shards}
    own = OwnProducts()
    for key, users in found.run.users.items():
        name = names.get(key)
        if name is None or name in shards or key in known or model.get_parameter(name).dim() < 2:
            continue
        holders = [m for m, module in model.named_modules() if any(p is not None and id(p) == key for p in
                   module._parameters.values())]  # fmt: skip
        user = next(iter(users))
        if users == set(holders) and user in found.linears:
            continue  # a linear by itself has no edges to split at
        if any(isinstance(model.get_submodule(holder), nn.Embedding) for holder in holders):
            continue
        if model.get_parameter(name).is_complex():
            own.reasons[name] = "it is complex"
        elif len(users) > 1 or len(holders) > 1:
            own.reasons[name] = "several modules multiply by it"
        elif not _within(holders[0], user):
            own.reasons[name] = f"{user or 'the model'} multiplies by it, and it belongs to another module"
        else:
            own.reasons[name] = "not split"
            own.users.setdefault(user, []).append(name)
    return own


def boundary_regions(
    model: nn.Module, found: Probe, own: OwnProducts, size: int, styles: Mapping[str, str] | None
) -> tuple[list[Region], list[Fit]]:
    """The modules of ``own`` that can be split at their edges, and those that other sizes could split."""
    regions: list[Region] = []
    misfits: list[Fit] = []
    for user, names in own.users.items():
        module = model.get_submodule(user)
        wanted = styles is None or any(
            style == "split" and fnmatchcase(user, pattern) for pattern, style in styles.items()
        )
        try:
            if not wanted:
                raise NotProven("the given plan does not split its module")
            split = _search(model, found, own, user, size)
            regions.append(split.region(_attribute_trials(model, user, module, size)))
        except NotProven as reason:
            text = str(reason)
            if wanted and _is_whole_module(own, user, module):
                legal = _legal_sizes(model, found, own, user, size)
                if len(legal) > 1 and size not in legal:
                    misfits.append(Fit(tuple(names), (), legal))
                    text = f"{size} ranks do not fit; legal sizes: {', '.join(map(str, legal))}"
            for name in names:
                own.reasons[name] = text
                holder = name.rpartition(".")[0]
                if holder in found.linears:
                    found.reasons[holder] = text
    return regions, misfits


def boundary_limits(model: nn.Module, found: Probe, own: OwnProducts, regions: list[Region], size: int) -> list[Fit]:
    """The sizes that split the modules of ``regions`` at their edges, one entry for each kind of module."""
    users = {region.module for region in regions if region.boundary is not None}
    kinds = {found.run.kind(found.run.module_calls[user][0]): user for user in users}
    return [Fit(tuple(own.users[user]), (), _legal_sizes(model, found, own, user, size)) for user in kinds.values()]


def _search(model: nn.Module, found: Probe, own: OwnProducts, user: str, size: int) -> BoundarySplit:
    module = model.get_submodule(user)
    if not _is_whole_module(own, user, module):
        raise NotProven("the module that multiplies by it holds other modules that do so")
    elements = sum(parameter.numel() for parameter in module.parameters())
    if elements > _LARGEST:
        raise NotProven(f"its module's {elements:,} parameters are too many to be proven in memory")
    function = local_forward(module)
    calls = found.run.module_calls[user]
    if calls[0].random_calls and function is None:
        raise NotProven("a dropout lies in its module, where it cannot be told whether it acts on sums or on addends")
    try:
        return BoundarySplit(model, user, calls[0], size, function)
    except NotProven:
        raise
    except Exception as error:
        raise NotProven(f"its module does not run by itself: {type(error).__name__}: {error}") from error


def _legal_sizes(model: nn.Module, found: Probe, own: OwnProducts, user: str, size: int) -> tuple[int, ...]:
    try:
        return _search(model, found, own, user, size).legal_sizes()
    except NotProven:
        return (1,)


def _is_whole_module(own: OwnProducts, user: str, module: nn.Module) -> bool:
    below = any(other != user and _within(other, user) for other in own.users)
    return not below and len(list(module.parameters())) <= _MOST_PARAMETERS


def _within(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _attribute_trials(
    model: nn.Module, user: str, module: nn.Module, size: int
) -> Iterator[tuple[AttributeChange, ...]]:
    """No change, then integers of the module or of one below it that are divisible, one and two at a time."""
    yield ()
    if local_forward(module) is not None:
        return
    changes = [
        AttributeChange(f"{user}.{name}".strip("."), key, value // size)
        for name, below in module.named_modules()
        for key, value in vars(below).items()
        if type(value) is int and value > 1 and value % size == 0 and not key.startswith("_")
    ]
    pairs = itertools.chain(
        ((change,) for change in changes),
        itertools.combinations(changes, 2),
    )
    yield from itertools.islice(pairs, _MOST_TRIALS)
