"""How fast a run trains: step time, samples and tokens per second."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_tp.callbacks.batch import sample_count, token_count
from lightning_tp.callbacks.run_info import completed_steps, data_parallel, is_log_step


@dataclass(frozen=True)
class ThroughputAverages:
    """Averages over ``steps`` optimizer steps. Rates count each sample of the global batch once.

    A rate is None if the batches do not tell their number of samples or tokens.
    """

    steps: int
    step_time: float  # seconds
    samples_per_second: float | None
    tokens_per_second: float | None


@dataclass
class _Window:
    """What was trained, on this rank, since the last measurement."""

    seconds: float = 0.0
    steps: int = 0
    samples: int | None = 0
    tokens: int | None = 0

    def add(self, other: _Window) -> None:
        self.seconds += other.seconds
        self.steps += other.steps
        self.samples = _sum(self.samples, other.samples)
        self.tokens = _sum(self.tokens, other.tokens)

    def averages(self, data_parallel_size: int) -> ThroughputAverages:
        def rate(count: int | None) -> float | None:
            return None if count is None else count * data_parallel_size / self.seconds

        return ThroughputAverages(self.steps, self.seconds / self.steps, rate(self.samples), rate(self.tokens))


class Throughput(pl.Callback):
    """Logs ``perf/step_time`` (s), ``perf/samples_per_second`` and ``perf/tokens_per_second`` at the log steps.

    Each value is the average since the last log step. A step is an optimizer step, with all its micro-batches and
    the loading of its data. Validation is not counted, nor what happens between epochs. Tokens are the elements of the
    first integer tensor of two or more dims in the batch; the rate is left out if a batch has none.

    Args:
        warmup: Steps at the start of each fit that are left out of all averages.
    """

    def __init__(self, warmup: int = 2) -> None:
        if warmup < 0:
            raise ValueError(f"Throughput(warmup={warmup}): the number of steps must be 0 or more.")
        self.warmup = warmup
        self._window = _Window()
        self._total = _Window()
        self._started: float | None = None
        self._data_parallel_size = 1
        self._first_step = 0
        self._global_step = 0

    @property
    def averages(self) -> ThroughputAverages | None:
        """Averages over the whole fit, without the warmup; None if no step was measured."""
        return self._total.averages(self._data_parallel_size) if self._total.steps else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._window = _Window()
        self._total = _Window()
        self._started = None
        self._data_parallel_size = data_parallel(trainer).size
        self._first_step = completed_steps(trainer)
        self._global_step = trainer.global_step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._started is None:
            self._started = _now(pl_module.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = trainer.global_step != self._global_step
        self._global_step = trainer.global_step
        self._window.add(_Window(0.0, int(stepped), sample_count(batch), token_count(batch)))
        if not stepped:
            return
        if completed_steps(trainer) + 1 - self._first_step <= self.warmup:
            self._window = _Window()
            self._started = _now(pl_module.device)
        elif is_log_step(trainer):
            self._stop_clock(pl_module)
            self._log(pl_module)
            self._close_window()
            self._started = _now(pl_module.device)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_clock(pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_clock(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_clock(pl_module)
        self._close_window()

    def _stop_clock(self, pl_module: pl.LightningModule) -> None:
        """Stop the clock, if it runs, until the next batch starts."""
        if self._started is not None:
            self._window.seconds += _now(pl_module.device) - self._started
            self._started = None

    def _close_window(self) -> None:
        # A window without a step is the rest of a step that did not end: its time belongs to no step.
        if self._window.steps:
            self._total.add(self._window)
        self._window = _Window()

    def _log(self, pl_module: pl.LightningModule) -> None:
        averages = self._window.averages(self._data_parallel_size)
        metrics = {
            "perf/step_time": averages.step_time,
            "perf/samples_per_second": averages.samples_per_second,
            "perf/tokens_per_second": averages.tokens_per_second,
        }
        for name, value in metrics.items():
            if value is not None:
                pl_module.log(name, value, on_step=True, on_epoch=False)


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _now(device: torch.device) -> float:
    """Seconds, after the work queued on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
