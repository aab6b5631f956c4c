"""Models whose parameters have no values: building them, and planning on values that need no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tp.errors import ParallelConfigError


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built in this context have their parameters on the meta device, without values.

    Buffers (masks, rotary frequencies, position ids) are computed as always, so that the model's code can be run. A
    plan for a model of any size can be found like this::

        with lightning_tp.parameters_on_meta():
            model = MyModel(hidden_size=12288, layers=96)
        plan = lightning_tp.find_plan(model, example_inputs, 8)
    """
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and type(param) is nn.Parameter and not param.is_meta:
            empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            vars(empty).update(vars(param))
            param = empty
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def values_for_meta(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers on the meta device stand at random values on the CPU; matrices need no memory for them.

    Raises:
        ParallelConfigError: a buffer on the meta device holds integers, which nobody can guess.
    """
    generator = torch.Generator().manual_seed(0)
    known: dict[int, Any] = {}
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for prefix, module in model.named_modules():
        for entries in (module._parameters, module._buffers):
            for key, value in entries.items():
                if value is None or not value.is_meta:
                    continue
                if id(value) not in known:
                    name = f"{prefix}.{key}".strip(".")
                    known[id(value)] = (
                        nn.Parameter(_parameter_values(value, generator), requires_grad=value.requires_grad)
                        if isinstance(value, nn.Parameter)
                        else _buffer_values(name, value, generator)
                    )
                changed.append((entries, key, value))
    try:
        for entries, key, value in changed:
            entries[key] = known[id(value)]
        yield
    finally:
        for entries, key, value in changed:
            entries[key] = value


def compact(like: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random numbers in the shape of ``like``, constant along diagonals: ``n + m - 1`` of them for ``[n, m]``."""
    numbers = torch.randn(sum(like.shape) - like.dim() + 1, generator=generator).to(dtype)
    return (0.02 * numbers).as_strided(like.shape, (1,) * like.dim())


def is_compact(value: Tensor) -> bool:
    """Whether elements of ``value`` share memory."""
    return value.dim() > 1 and value.untyped_storage().nbytes() < value.numel() * value.element_size()


def _parameter_values(parameter: Tensor, generator: torch.Generator) -> Tensor:
    if not parameter.is_floating_point():
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    if parameter.dim() > 1 and parameter.numel():
        return compact(parameter, parameter.dtype, generator)
    return 1 + 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def _buffer_values(name: str, buffer: Tensor, generator: torch.Generator) -> Tensor:
    if buffer.is_floating_point():
        return torch.rand(buffer.shape, generator=generator).to(buffer.dtype)
    if buffer.dtype is torch.bool:
        return torch.ones(buffer.shape, dtype=torch.bool)
    raise ParallelConfigError(
        f"The buffer {name} is on the meta device, and holds {str(buffer.dtype).removeprefix('torch.')} numbers that "
        "the model's code needs to run. Build the model in `with lightning_tp.parameters_on_meta():`, which keeps the "
        "values of buffers."
    )
