"""Errors of configuration, and how one of them is raised once although every rank runs into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class ParallelConfigError(ValueError):
    """What was asked does not fit the model, the devices or the plan. The message says what would."""


class CommandError(Exception):
    """A command of `lightning-tp` could not do its work: bad usage, or something that it runs failed. The message says
    which, and what to change."""


class PlanError(ParallelConfigError):
    """A sharding plan that does not fit the model it is applied to."""


def run_on_rank_zero(function: Callable[[], T]) -> T:
    """Run ``function`` on rank zero of the default process group and return its result on every rank.

    An error of ``function`` is raised on rank zero only; the other ranks leave with exit status 1 and print
    nothing, so that the user reads one message. Collective: every rank must call it.

    Raises:
        Exception: on rank zero, whatever ``function`` raised.
        SystemExit: on the other ranks, when ``function`` failed.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return function()
    outcome: list[object] = [None, None]
    error: BaseException | None = None
    if dist.get_rank() == 0:
        try:
            outcome = [True, function()]
        except BaseException as exc:
            error = exc
            outcome = [False, None]
    dist.broadcast_object_list(outcome, src=0)
    if error is not None:
        raise error
    if not outcome[0]:
        raise SystemExit(1)
    return outcome[1]  # type: ignore[return-value]


def raise_on_rank_zero(error: Exception, rank: int) -> None:
    """Raise an ``error`` that every rank has found by itself: on rank zero as it is, elsewhere as a silent exit."""
    if rank == 0:
        raise error
    raise SystemExit(1)
