"""Arguments of a module of which each rank takes its part."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tp.errors import ParallelConfigError
from lightning_tp.plan.sharding_plan import ArgumentSlice


def argument_name(module: nn.Module, position: str) -> str:
    """The name of an argument that was passed at ``position``; a name stays as it is."""
    names = positional_names(module)
    return names[int(position)] if position.isdecimal() and int(position) < len(names) else position


def named_arguments(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call, by name."""
    return {argument_name(module, str(position)): value for position, value in enumerate(args)} | kwargs


def sliced_arguments(
    names: Sequence[str],
    slices: Sequence[ArgumentSlice],
    rank: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with each sliced one cut to the part of ``rank``; ``prepare`` sees it whole before.

    Args:
        names: Those of the called module's arguments, see :func:`positional_names`.

    Raises:
        ParallelConfigError: a size is no multiple of the period with which the parts repeat.
    """
    changed, changed_names = list(args), dict(kwargs)
    for cut in slices:
        position = names.index(cut.argument) if cut.argument in names else int(cut.argument)
        if cut.argument in changed_names:
            changed_names[cut.argument] = _part(changed_names[cut.argument], cut, rank, prepare)
        elif position < len(changed):
            changed[position] = _part(changed[position], cut, rank, prepare)
    return tuple(changed), changed_names


def _part(value: Any, cut: ArgumentSlice, rank: int, prepare: Callable[[Tensor], Tensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    size = value.shape[cut.dim]
    if size % cut.period:
        raise ParallelConfigError(
            f"The argument {cut.argument} has the size {size} in dim {cut.dim}, which is no multiple of {cut.period}: "
            "it is not laid out as it was when the split was proven."
        )
    within = torch.tensor([i for start, stop in cut.rows[rank] for i in range(start, stop)], device=value.device)
    starts = torch.arange(0, size, cut.period, device=value.device)
    return prepare(value).index_select(cut.dim, (starts[:, None] + within).flatten())


def positional_names(module: nn.Module) -> list[str]:
    """The names of the arguments that the module's forward takes by position, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds]
