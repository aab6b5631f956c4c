"""Which indices of a tensor gradients reach, and whether the ranks' index sets are a split of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_tp.plan.sharding_plan import Ranges, ranges_of

IndexSets = list[Tensor]
"""For each dim of a tensor ``[ranks, size of the dim]``, true where that rank needs something at that index."""


def index_sets(shape: Sequence[int], ranks: int) -> IndexSets:
    """Empty sets for a tensor of ``shape``."""
    return [torch.zeros(ranks, size, dtype=torch.bool) for size in shape]


def note(sets: IndexSets, rank: int, grad: Tensor | None) -> None:
    """Add to ``rank``'s sets the indices at which ``grad`` is not zero."""
    if grad is None or not grad.numel():
        return
    reached = grad != 0
    for dim, indices in enumerate(sets):
        others = [other for other in range(reached.dim()) if other != dim]
        indices[rank] |= (reached.any(others) if others else reached).cpu()


def split_of(sets: Tensor) -> tuple[Ranges, ...] | None:
    """The ranks' ranges, if their sets ``[ranks, size]`` are a clean split, and not all the same."""
    if not is_clean(sets) or sets.all():
        return None
    return tuple(ranges_of(row.nonzero().flatten().tolist()) for row in sets)


def is_clean(sets: Tensor) -> bool:
    """Whether the ranks' sets ``[ranks, size]`` cover everything, are of one size, and pairwise disjoint or equal."""
    equal_or_disjoint = all(not (a & b).any() or torch.equal(a, b) for a, b in itertools.combinations(sets, 2))
    return bool(sets.any(0).all()) and len(set(sets.sum(1).tolist())) == 1 and equal_or_disjoint


def union(sets: Iterable[Tensor]) -> Tensor:
    """What is in any of ``sets``."""
    return torch.stack(list(sets)).any(0)
