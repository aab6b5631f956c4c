"""Where the time of a step goes, from the events of a profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch._C._profiler import _EventType

PRODUCTS, ATTENTION, OPTIMIZER, OTHER = "matrix products", "attention", "optimizer", "other operations"
COLLECTIVES, BETWEEN = "collectives", "between operations"
KINDS = (PRODUCTS, ATTENTION, OTHER, OPTIMIZER, COLLECTIVES, BETWEEN)
"""Collectives: while one is on its way and nothing is computed. Between operations: Python, autograd, dispatch."""

_OPERATORS = {
    "aten::mm": PRODUCTS,
    "aten::addmm": PRODUCTS,
    "aten::bmm": PRODUCTS,
    "mkl::_mkl_linear": PRODUCTS,
    "aten::_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": ATTENTION,
    "aten::_fused_adamw_": OPTIMIZER,
}

Interval = tuple[int, int]


def time_by_kind(roots: Sequence[Any], start: int, end: int) -> dict[str, float]:
    """Seconds of each of :data:`KINDS` between two times in nanoseconds; they add up to all of it.

    Args:
        roots: The events without a parent, of all threads. The thread that starts the first is the one that is timed:
            on a CPU it runs the backward pass too.
    """
    thread = min(roots, key=lambda node: node.start_time_ns).start_tid
    computing: dict[str, list[Interval]] = {kind: [] for kind in (PRODUCTS, ATTENTION, OTHER, OPTIMIZER)}
    started: list[int] = []
    ended: list[int] = []
    waiting: list[Interval] = []
    for node, on_thread in _outermost(roots, thread):
        interval = (node.start_time_ns, node.start_time_ns + node.duration_time_ns)
        if node.name.startswith("gloo:"):
            ended.append(interval[1])
        elif node.name.startswith("c10d::"):
            started.append(interval[0])
        elif node.name.startswith("deepspeed::"):
            waiting.append(interval)
        elif on_thread:
            computing[_OPERATORS.get(node.name, OTHER)].append(interval)
    # A process group runs its collectives in the order in which they are started.
    waiting += zip(sorted(started), sorted(ended), strict=False)
    busy = {kind: sum(e - s for s, e in intervals) for kind, intervals in computing.items()}
    everything = [interval for intervals in computing.values() for interval in intervals]
    idle = _covered([*everything, *waiting]) - _covered(everything)
    times = {**busy, COLLECTIVES: idle, BETWEEN: end - start - sum(busy.values()) - idle}
    return {kind: times[kind] / 1e9 for kind in KINDS}


def _outermost(roots: Sequence[Any], thread: int) -> Iterator[tuple[Any, bool]]:
    """The operations that do work themselves, and whether they run on ``thread``: what wraps them is gone through."""
    pending = list(roots)
    while pending:
        node = pending.pop()
        whole = _is_known(node) or (node.name.startswith("aten::") and not _holds_known(node))
        if whole and node.tag == _EventType.TorchOp:
            yield node, node.start_tid == thread
        else:
            pending += node.children


def _is_known(node: Any) -> bool:
    return node.name in _OPERATORS or node.name.startswith(("gloo:", "c10d::", "deepspeed::"))


def _holds_known(node: Any) -> bool:
    return any(_is_known(child) or _holds_known(child) for child in node.children)


def _covered(intervals: Sequence[Interval]) -> int:
    """Length of the union."""
    length, reached = 0, 0
    for start, end in sorted(intervals):
        length += max(0, end - max(start, reached))
        reached = max(reached, end)
    return length
