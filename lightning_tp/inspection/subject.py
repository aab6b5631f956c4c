"""The model that is inspected, and how it is run."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_tp.errors import CommandError


class InspectError(CommandError):
    """The model could not be built, run or planned. The message says why, and what to change."""


@dataclass(frozen=True)
class Subject:
    """A model, with a call that runs it once on example inputs and returns what is computed from it."""

    model: nn.Module
    run: Callable[[], Any]

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def with_inputs(model: nn.Module, inputs: Any) -> Subject:
    """``model`` with a tensor, a tuple of arguments, or a dict of keyword arguments for its forward.

    Raises:
        InspectError: ``inputs`` are none of these.
    """
    if isinstance(inputs, Tensor):
        return Subject(model, lambda: model(inputs))
    if isinstance(inputs, Mapping):
        return Subject(model, lambda: model(**inputs))
    if isinstance(inputs, (tuple, list)):
        return Subject(model, lambda: model(*inputs))
    raise InspectError(
        "example inputs must be a tensor, a tuple of arguments, or a dict of keyword arguments of the model's forward, "
        f"not {type(inputs).__name__}."
    )


def in_words(error: BaseException) -> str:
    """An error of somebody else's code in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def near_misses(wrong: str, names: Iterable[str]) -> str:
    """A question with up to five of ``names`` that resemble ``wrong``, or nothing."""
    near = difflib.get_close_matches(wrong, list(names), n=5)
    return f" Did you mean {', '.join(near)}?" if near else ""
