"""Running a model without leaving a trace: random state, buffers, metrics and other state come back as they were."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_tp.errors import ParallelConfigError


@contextmanager
def random_state_kept() -> Iterator[None]:
    """The random state of Python, NumPy and torch (CPU and CUDA) is afterwards what it was before."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def module_state_kept(model: nn.Module) -> Iterator[None]:
    """What the modules of ``model`` hold is afterwards what it was before: buffers, metric states, lists, counters.

    Parameters are not copied; a run that changes one in place is an error.

    Raises:
        ParallelConfigError: a parameter was changed in place.
    """
    versions = [(name, parameter, parameter._version, parameter.grad) for name, parameter in model.named_parameters()]
    saved = [(module, _snapshot(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, entries in saved:
            _restore(vars(module), entries)
    for name, parameter, version, grad in versions:
        if parameter._version != version:
            raise ParallelConfigError(
                f"Running the model once to plan its split changed the parameter {name} in place. "
                "Set example_input_array on the LightningModule, so that forward is run instead of training_step, "
                "or give the strategy a saved plan."
            )
        parameter.grad = grad


def _snapshot(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """For each attribute the object itself and, where it can change in place, a copy of its content."""
    snapshot: dict[str, tuple[Any, Any]] = {}
    for name, value in attributes.items():
        if name in ("_parameters", "_modules"):
            content: Any = dict(value)
        elif name == "_buffers":
            content = {key: (buffer, _content(buffer)) for key, buffer in value.items()}
        else:
            content = _content(value)
        snapshot[name] = (value, content)
    return snapshot


def _content(value: Any) -> Any:
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, (list, deque)):
        return list(value)
    if isinstance(value, (dict, set)):
        return value.copy()
    return None


def _restore(attributes: dict[str, Any], snapshot: dict[str, tuple[Any, Any]]) -> None:
    for name in [name for name in attributes if name not in snapshot]:
        del attributes[name]
    for name, (value, content) in snapshot.items():
        attributes[name] = value
        if name == "_buffers":
            value.clear()
            for key, (buffer, saved) in content.items():
                value[key] = buffer
                _refill(buffer, saved)
        else:
            _refill(value, content)


def _refill(value: Any, content: Any) -> None:
    if content is None:
        return
    if isinstance(value, Tensor):
        if value.shape != content.shape:
            raise ParallelConfigError("Running the model once to plan its split resized one of its buffers.")
        if value.requires_grad and not content.requires_grad:
            value.detach_()  # gradients were on where the model switches them off
        if not torch.equal(value, content):
            with torch.no_grad():
                value.copy_(content)
    elif isinstance(value, (list, deque)):
        if len(value) != len(content) or any(a is not b for a, b in zip(value, content, strict=True)):
            value.clear()
            value.extend(content)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(content)
