"""What one step uses: memory, collectives and time by kind of operation, from a profile of it.

The profile sees what runs, so that it counts alike for eager and compiled code, for DDP's buckets, which C++ reduces,
and for libraries with collectives of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine.time_spent import time_by_kind

_KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "deepspeed::inference_all_reduce_": "all_reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
}
"""Kinds of collectives by the operator that starts them; functional collectives come down to these."""


@dataclass(frozen=True)
class Count:
    """Collectives of one kind on one rank; ``bytes`` is the larger of what goes in and what comes out, summed."""

    calls: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Usage:
    """What one rank uses in a step.

    Attributes:
        held_bytes: Of parameters, buffers and optimizer state, between steps.
        peak_bytes: Largest number of bytes of tensors at one time of a step, with what is held.
        collectives: By kind.
        seconds: Where the time goes, by kind of operation; the profile itself costs some.
    """

    held_bytes: int
    peak_bytes: int
    collectives: dict[str, Count] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def measure_usage(step: Callable[[], Any], held: Sequence[Tensor]) -> Usage:
    """Profile ``step()``, which must find no gradients: the profile sees no release of what existed before it.

    Args:
        held: The tensors that outlive steps.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    held_bytes = sum(storages.values())
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as profiler:
        start = time.time_ns()
        step()
        end = time.time_ns()
    assert profiler.profiler is not None
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    allocated: list[tuple[int, int]] = []
    collectives: dict[str, Count] = {}
    for node in _nodes(roots):
        tag, fields = node.typed
        if tag == _EventType.Allocation:
            allocated.append((node.start_time_ns, fields.alloc_size))
        elif tag == _EventType.TorchOp and node.name in _KINDS:
            kind, before = _KINDS[node.name], collectives.get(_KINDS[node.name], Count())
            size = max((_bytes(value) for value in fields.inputs), default=0)
            collectives[kind] = Count(before.calls + 1, before.bytes + size)
    now = peak = 0
    for _, size in sorted(allocated, key=lambda event: event[0]):
        now += size
        peak = max(peak, now)
    return Usage(held_bytes, held_bytes + peak, collectives, time_by_kind(roots, start, end))


def _nodes(roots: Sequence[Any]) -> Iterator[Any]:
    """Every event, depth first."""
    pending = list(roots)
    while pending:
        node = pending.pop()
        pending += node.children
        yield node


def _bytes(value: Any) -> int:
    """Size of an operator's argument: a tensor, a list of tensors, or something without one."""
    if isinstance(value, (list, tuple)):
        return sum(_bytes(entry) for entry in value)
    if not hasattr(value, "sizes"):
        return 0
    elements = 1
    for size in value.sizes:
        elements *= size
    return elements * value.dtype.itemsize
