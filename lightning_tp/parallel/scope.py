"""What holds only while something runs, in eager code and in code that torch.compile traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as _with_side_effects

from lightning_tp.errors import ParallelConfigError

_Result = TypeVar("_Result")


class Scope:
    """Whether something runs right now; see :class:`Entered`."""

    def __init__(self) -> None:
        self.active = False


class Entered:
    """While it is entered ``scope`` is active; behind it the scope is what it was.

    It is made where it is entered: torch.compile traces context managers that the traced code makes, and no others.

    Raises:
        ParallelConfigError: code inside mixes DTensors, which it did not read from modules, with tensors.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope, self._before = scope, scope.active

    def __enter__(self) -> None:
        change(_set_active, self._scope, True)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        change(_set_active, self._scope, self._before)
        if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
            raise ParallelConfigError(
                "The model computes with parameters from parameters() or state_dict(), which are DTensors on a mesh. "
                "Read them from their modules (module.weight), and leave weight decay to the optimizer."
            ) from error


def change(function: Callable[..., _Result], *args: Any) -> _Result:
    """``function(*args)``, which changes what this rank remembers of a running region.

    All of it is undone when the region has run, so a recomputation finds what the first run found. torch.compile has to
    be told so: of code under activation checkpointing it takes no change of anything outside.
    """
    return _with_side_effects(function, *args) if torch.compiler.is_compiling() else function(*args)


def _set_active(scope: Scope, active: bool) -> None:
    scope.active = active
