"""Code run as it is written: recomputation and compilation would hide it from the probe and the proofs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint

from lightning_tp.plan.region_run import RegionRun


@contextmanager
def plain_code() -> Iterator[None]:
    """``torch.utils.checkpoint`` (both kinds) calls its function and nothing else; what is compiled runs eagerly."""
    generator = checkpoint._checkpoint_without_reentrant_generator
    checkpoint._checkpoint_without_reentrant_generator = _nothing_around
    checkpoint.CheckpointFunction.apply = staticmethod(_call)  # type: ignore[method-assign]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = generator
        del checkpoint.CheckpointFunction.apply


def _nothing_around(*args: Any, **kwargs: Any) -> Iterator[None]:
    _note()
    yield


def _call(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    _note()
    return function(*args)


def _note() -> None:
    """Tell the runs of regions in which a checkpoint stands."""
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, RegionRun):
            mode.recomputes = True
