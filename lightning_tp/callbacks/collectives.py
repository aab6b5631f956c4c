"""Which collectives one training step runs, and how many bytes they carry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Kinds by operator name. Functional collectives keep in-place and coalesced variants under names of their own.
_KINDS = {
    "c10d": {
        "allreduce_": "all_reduce",
        "allreduce_coalesced_": "all_reduce",
        "_allgather_base_": "all_gather",
        "allgather_": "all_gather",
        "allgather_coalesced_": "all_gather",
        "allgather_into_tensor_coalesced_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "reduce_scatter_": "reduce_scatter",
        "reduce_scatter_tensor_coalesced_": "reduce_scatter",
        "alltoall_": "all_to_all",
        "alltoall_base_": "all_to_all",
        "broadcast_": "broadcast",
        "gather_": "gather",
        "scatter_": "scatter",
        "reduce_": "reduce",
        "send": "send",
        "recv_": "recv",
        "recv_any_source_": "recv",
        "barrier": "barrier",
        "monitored_barrier_": "barrier",
    },
    "_c10d_functional": {
        "all_reduce": "all_reduce",
        "all_reduce_": "all_reduce",
        "all_reduce_coalesced": "all_reduce",
        "all_reduce_coalesced_": "all_reduce",
        "all_gather_into_tensor": "all_gather",
        "all_gather_into_tensor_out": "all_gather",
        "all_gather_into_tensor_coalesced": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "reduce_scatter_tensor_out": "reduce_scatter",
        "reduce_scatter_tensor_coalesced": "reduce_scatter",
        "all_to_all_single": "all_to_all",
        "broadcast": "broadcast",
        "broadcast_": "broadcast",
        "isend": "send",
        "irecv": "recv",
        "batch_p2p_ops": "send_recv",
    },
}


@dataclass(frozen=True)
class CollectiveCount:
    """Collectives of one kind, on one rank. ``bytes`` is the larger of what goes in and what comes out, summed."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: CollectiveCount) -> CollectiveCount:
        return CollectiveCount(self.calls + other.calls, self.bytes + other.bytes)


class CollectiveCounter(pl.Callback):
    """Counts the collectives of one training step on this rank: forward, backward and optimizer step.

    With gradient accumulation the step has all its micro-batches. Collectives inside ``on_...`` hooks, of callbacks or
    of the LightningModule, do not count, nor does what the Trainer does between batches. ``self.log(...,
    sync_dist=True)`` in ``training_step`` does.

    Args:
        step: Which step of the fit is counted, the first being 1. The first two are not typical: DDP rebuilds its
            buckets and optimizers build their state.
    """

    def __init__(self, step: int = 3) -> None:
        if step < 1:
            raise ValueError(f"CollectiveCounter(step={step}): steps count from 1.")
        self.step = step
        self.counts: dict[str, CollectiveCount] = {}
        """Collectives of the counted step by kind, such as "all_reduce". Empty until ``measured``."""
        self.measured = False
        """Whether the step to count has ended."""
        self._mode: _CountingMode | None = None
        self._steps = 0
        self._global_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.counts = {}
        self.measured = False
        self._steps = 0
        self._global_step = trainer.global_step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._steps == self.step - 1:
            # Lightning keeps the name of the running hook here; inside a step it is "training_step", "backward", ...
            self._mode = _CountingMode(lambda: not str(pl_module._current_fx_name).startswith("on_"))
            self._mode.__enter__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        counted = self._leave()
        for kind, count in counted.items():
            self.counts[kind] = self.counts.get(kind, CollectiveCount()) + count
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._steps += 1
            self.measured = self._steps >= self.step

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Lightning tears down without `on_exception` when a tuner ends a fit.
        self._leave()

    def _leave(self) -> dict[str, CollectiveCount]:
        mode, self._mode = self._mode, None
        if mode is None:
            return {}
        mode.__exit__(None, None, None)
        return mode.counts


class _CountingMode(TorchDispatchMode):
    """Counts collective operators that run while ``active()`` holds."""

    def __init__(self, active: Callable[[], bool]) -> None:
        super().__init__()
        self.counts: dict[str, CollectiveCount] = {}
        self._active = active

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor first breaks its operator up; the collectives in it then come back here.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        kind = _kind(func)
        if kind is not None and self._active():
            size = max(_bytes(value) for value in (*args, *(kwargs or {}).values(), result))
            self.counts[kind] = self.counts.get(kind, CollectiveCount()) + CollectiveCount(1, size)
        return result


def _kind(func: Any) -> str | None:
    if not isinstance(func, torch._ops.OpOverload):
        return None
    return _KINDS.get(func.namespace, {}).get(func._schema.name.split("::")[1])


def _bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
