"""Peak memory of every rank."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_tp.callbacks.run_info import is_log_step

GIB = 2**30


class MemoryMonitor(pl.Callback):
    """Logs ``memory/rank_{i}_peak_gib`` for every rank ``i`` at the log steps.

    On CUDA it is the peak of the memory allocated by torch, elsewhere the resident peak of the process. Both are
    peaks since the process started.
    """

    def __init__(self) -> None:
        self.peaks: list[int] = []
        """Peak memory of each rank in bytes, as last measured."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Between micro-batches Lightning hands nothing to the loggers.
        if is_log_step(trainer) and not trainer.fit_loop._should_accumulate():
            self._measure(trainer)
            for rank, peak in enumerate(self.peaks):
                pl_module.log(f"memory/rank_{rank}_peak_gib", peak / GIB, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._measure(trainer)

    def _measure(self, trainer: pl.Trainer) -> None:
        """Collective over all ranks of ``trainer``."""
        device = trainer.strategy.root_device
        own = torch.tensor([peak_memory(device)], dtype=torch.int64, device=device)
        # A process group may exist although this Trainer runs alone on one device.
        if trainer.world_size > 1 and dist.is_initialized():
            gathered = own.new_empty(dist.get_world_size())
            dist.all_gather_single(gathered, own)
            self.peaks = gathered.tolist()
        else:
            self.peaks = own.tolist()


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: allocated by torch on a CUDA ``device``, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        # Not getrusage: on Linux its peak includes that of the process that launched this one.
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
