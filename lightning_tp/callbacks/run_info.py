"""What the callbacks need to know of a run: how it is laid out, and when it logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.tensor import DTensor

from lightning_tp.layout import ParallelLayout

C = TypeVar("C", bound=pl.Callback)


class Plan(Protocol):
    """The part of a sharding plan that is logged."""

    def to_dict(self) -> dict[str, Any]: ...

    def describe(self) -> str: ...


class Parameters(Protocol):
    """Parameter counts of a tensor-parallel model, in numbers of elements."""

    @property
    def total(self) -> int: ...

    @property
    def per_rank(self) -> int: ...

    @property
    def split(self) -> int: ...

    @property
    def split_share(self) -> float: ...


@runtime_checkable
class TensorParallel(Protocol):
    """What tells a tensor-parallel strategy from others; stated here so that callbacks import no strategy."""

    @property
    def layout(self) -> ParallelLayout: ...

    @property
    def plan(self) -> Plan: ...

    def parameter_summary(self) -> Parameters: ...


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameter elements. ``split`` and ``split_share`` are zero where nothing is split over ``tp``."""

    total: int
    per_rank: int
    split: int
    split_share: float


@dataclass(frozen=True)
class DataParallel:
    """The shard of the data that this rank reads: number ``rank`` of ``size``. Tensor-parallel peers read the same."""

    rank: int
    size: int


def data_parallel(trainer: pl.Trainer) -> DataParallel:
    """This rank's place among the shards of the data, as the strategy tells Lightning's distributed sampler."""
    sampler = trainer.distributed_sampler_kwargs
    if sampler is None:
        return DataParallel(rank=0, size=1)
    return DataParallel(rank=sampler["rank"], size=sampler["num_replicas"])


def count_parameters(trainer: pl.Trainer) -> ParameterCount | None:
    """Count the parameters of the model in ``trainer``, after the strategy has set it up.

    Returns:
        None under FSDP version 1, whose flat parameters do not tell the size of the whole model.
    """
    strategy = trainer.strategy
    if isinstance(strategy, TensorParallel):
        summary = strategy.parameter_summary()
        return ParameterCount(summary.total, summary.per_rank, summary.split, summary.split_share)
    if isinstance(strategy, FSDPStrategy):
        return None
    parameters = list(trainer.lightning_module.parameters())
    local = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    return ParameterCount(
        total=sum(p.numel() for p in parameters), per_rank=sum(p.numel() for p in local), split=0, split_share=0.0
    )


def is_log_step(trainer: pl.Trainer) -> bool:
    """Whether the batch that ends now completes a step whose metrics Lightning hands to the loggers.

    The answer is the same on all ranks, so that a collective may depend on it.
    """
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return interval > 0 and (completed_steps(trainer) + 1) % interval == 0


def completed_steps(trainer: pl.Trainer) -> int:
    """Training steps completed before the current one: Lightning's step number of the loggers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """All callbacks of ``trainer``, in the order in which their hooks run."""
    return trainer.callbacks  # type: ignore[attr-defined]


def find_callback(trainer: pl.Trainer, kind: type[C]) -> C | None:
    """The first callback of this ``kind`` in ``trainer``."""
    return next((callback for callback in callbacks_of(trainer) if isinstance(callback, kind)), None)
