"""Which of the run's cut outputs and parameters a tensor was computed from, read off the autograd graph."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

_DEEPEST_OBJECT = 3
_OWN_STATE = {"transformers.cache_utils.Cache"}
"""Classes whose objects carry a model's own state from call to call (keys and values of earlier tokens): what is split
stays split in them, each rank has its part."""


def tensors_in(value: Any, depth: int = _DEEPEST_OBJECT) -> Iterator[Tensor]:
    """The tensors in ``value``: in containers, and in the attributes of other objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and _is_object(leaf) and not _is_own_state(leaf):
            yield from tensors_in(dict(vars(leaf)), depth - 1)


def copied_objects(value: Any) -> Any:
    """``value`` with the objects in it that code could fill (caches) copied; tensors and modules stay the same."""

    def copied(leaf: Any) -> Any:
        if not _is_object(leaf):
            return leaf
        kept: dict[int, Any] = {id(tensor): tensor for tensor in _all_tensors(leaf)}
        try:
            return copy.deepcopy(leaf, kept)
        except Exception:  # it cannot be copied (a lock, a file): it is no store of tensors
            return leaf

    return tree_map(copied, value)


def _all_tensors(value: Any, depth: int = 2 * _DEEPEST_OBJECT) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and _is_object(leaf):
            yield from _all_tensors(dict(vars(leaf)), depth - 1)


def _is_object(value: Any) -> bool:
    """Whether ``value`` may hold tensors in its attributes."""
    return hasattr(value, "__dict__") and not isinstance(value, (Tensor, type, nn.Module)) and not callable(value)


def _is_own_state(value: Any) -> bool:
    return any(f"{base.__module__}.{base.__qualname__}" in _OWN_STATE for base in type(value).__mro__)


class Reach:
    """Sets of graph leaves as bit masks; every node of the graph is visited once over all queries."""

    def __init__(self, leaves: list[Tensor]) -> None:
        self._bit = {id(leaf): 1 << position for position, leaf in enumerate(leaves)}
        self._known: dict[Any, int] = {}

    def of(self, tensor: Any) -> int:
        """The leaves that ``tensor`` was computed from, itself included, as a bit mask."""
        if not isinstance(tensor, Tensor):
            return 0
        if tensor.grad_fn is None:
            return self._bit.get(id(tensor), 0)
        stack = [tensor.grad_fn]
        while stack:
            node = stack[-1]
            if node in self._known:
                stack.pop()
                continue
            children = [child for child, _ in node.next_functions if child is not None]
            missing = [child for child in children if child not in self._known]
            if missing:
                stack.extend(missing)
                continue
            variable = getattr(node, "variable", None)
            mask = self._bit.get(id(variable), 0) if variable is not None else 0
            for child in children:
                mask |= self._known[child]
            self._known[node] = mask
            stack.pop()
        return self._known[tensor.grad_fn]


def connected(edges: list[tuple[int, int]], number: int, excluded: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The connected producers and consumers of ``(producer, consumer)`` edges, without those of ``excluded``."""
    parent = list(range(2 * number + 1))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for producer in excluded:
        parent[root(producer)] = root(2 * number)
    for producer, consumer in edges:
        parent[root(producer)] = root(number + consumer)
    components: dict[int, tuple[set[int], set[int]]] = {}
    for producer, consumer in edges:
        if root(producer) != root(2 * number):
            found = components.setdefault(root(producer), (set(), set()))
            found[0].add(producer)
            found[1].add(consumer)
    return sorted((sorted(producers), sorted(consumers)) for producers, consumers in components.values())
