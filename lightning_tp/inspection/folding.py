"""Names of repeated blocks as one: ``layers.0.up``, ``layers.1.up`` fold to ``layers.{0..1}.up``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_INDEX_IN_NAME = re.compile(r"(?<=[A-Za-z_])\.\d+(?=\.|\b)")


_Group = tuple[tuple[tuple[str, ...], ...], list[str]]
"""For each part of the names its alternatives, and the names."""


@dataclass(frozen=True)
class Fold:
    """Names that differ in indices only, every combination of which is among them.

    Attributes:
        label: ``"layers.{0..3}.up"``.
        names: The names, in the order in which they were given.
    """

    label: str
    names: tuple[str, ...]


def fold(names: Iterable[str]) -> list[Fold]:
    """Fold ``names``, in the order of the first name of each fold."""
    order = {name: place for place, name in enumerate(dict.fromkeys(names))}
    groups: list[_Group] = [(tuple((part,) for part in name.split(".")), [name]) for name in order]
    # From the right, so that the blocks of one stage are one before stages with the same blocks are.
    for position in reversed(range(max((len(parts) for parts, _ in groups), default=0))):
        groups = _merged_at(position, groups)
    return [
        Fold(".".join(map(_alternatives, parts)), tuple(sorted(members, key=order.__getitem__)))
        for parts, members in groups
    ]


def labels(names: Iterable[str]) -> list[str]:
    """The labels of the folded ``names``."""
    return [folded.label for folded in fold(names)]


def without_indices(text: str) -> str:
    """``text`` with every index within a dotted name replaced by ``*``."""
    return _INDEX_IN_NAME.sub(".*", text)


def relative(name: str, parent: str) -> str:
    """``name`` as seen from the module ``parent``; from elsewhere it keeps its place, without indices."""
    if not parent or name == parent:
        return name
    return name.removeprefix(f"{parent}.") if name.startswith(f"{parent}.") else without_indices(name)


def common_parent(names: Sequence[str]) -> str:
    """The innermost module that holds all of ``names``."""
    parents = [name.split(".")[:-1] for name in names]
    shared = []
    for level in zip(*parents, strict=False):
        if any(part != level[0] for part in level):
            break
        shared.append(level[0])
    return ".".join(shared)


def _merged_at(position: int, groups: list[_Group]) -> list[_Group]:
    merged: dict[object, _Group] = {}
    for parts, members in groups:
        if position >= len(parts) or not all(part.isdecimal() for part in parts[position]):
            merged[parts] = (parts, members)
            continue
        key = (parts[:position], parts[position + 1 :])
        found = merged.get(key)
        if found is None:
            merged[key] = (parts, members)
        else:
            together = (*found[0][:position], found[0][position] + parts[position], *found[0][position + 1 :])
            merged[key] = (together, found[1] + members)
    return list(merged.values())


def _alternatives(parts: tuple[str, ...]) -> str:
    if len(parts) == 1:
        return parts[0]
    indices = sorted(map(int, parts))
    if indices == list(range(indices[0], indices[-1] + 1)):
        return f"{{{indices[0]}..{indices[-1]}}}"
    return f"{{{','.join(map(str, indices))}}}"
