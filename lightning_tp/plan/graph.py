"""Which of the run's cut outputs and parameters a tensor was computed from, read off the autograd graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_DEEPEST_OBJECT = 3


def tensors_in(value: Any, depth: int = _DEEPEST_OBJECT) -> Iterator[Tensor]:
    """The tensors in ``value``: in containers, and in the attributes of other objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)):
            yield from tensors_in(dict(vars(leaf)), depth - 1)


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
