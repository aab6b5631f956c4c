"""Rescaling the sizes that a module's code names, where its tensors hold one rank's share.

Code such as ``B, T, C = x.size(); q = qkv.split(C, dim=2)[0]; q.view(B, T, heads, C // heads)`` computes sizes from a
replicated tensor and applies them to a split one. For every such call a :class:`SizeRule` says which dim is split and
which requested size is divided. The same functions derive the rules at planning time and apply them in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_tp.errors import ParallelConfigError
from lightning_tp.plan.sharding_plan import SizeRule

_VIEWS: dict[Any, str] = {Tensor.view: "view", Tensor.reshape: "reshape", torch.reshape: "reshape"}
_UNFLATTENS: dict[Any, str] = {Tensor.unflatten: "unflatten", torch.unflatten: "unflatten"}
_SPLITS: dict[Any, str] = {Tensor.split: "split", torch.split: "split"}
_NARROWS: dict[Any, str] = {Tensor.narrow: "narrow", torch.narrow: "narrow"}
_EXPANDS: dict[Any, str] = {Tensor.expand: "expand"}
_SLICES: dict[Any, str] = {Tensor.__getitem__: "slice"}
SIZED_FUNCTIONS: dict[Any, str] = {**_VIEWS, **_UNFLATTENS, **_SPLITS, **_NARROWS, **_EXPANDS, **_SLICES}


class SizesDoNotFit(ParallelConfigError):
    """A call that names sizes has no rule that makes it fit one rank's share."""


def names_sizes(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call names sizes (a view as another dtype does not)."""
    if function not in SIZED_FUNCTIONS or not args or not isinstance(args[0], Tensor):
        return False
    return not (function in _VIEWS and len(args) > 1 and isinstance(args[1], torch.dtype))


def output_shape(result: Any) -> tuple[int, ...]:
    """The shape of a call's result; of its first part where it has several."""
    return tuple(result.shape if isinstance(result, Tensor) else result[0].shape)


def derive_rule(function: Any, full_input: Sequence[int], full_output: Sequence[int], share: Sequence[int]) -> SizeRule:
    """The rule of one call, from the shapes of the unsplit run and the shape of its tensor on one rank.

    Args:
        function: The called function.
        full_input: Shape of the tensor in the unsplit run.
        full_output: Shape of the (first) result in the unsplit run.
        share: Shape of the tensor on one rank.

    Raises:
        SizesDoNotFit: the shapes differ otherwise than by a factor in one dim, or no requested size takes the factor.
    """
    name = SIZED_FUNCTIONS[function]
    if len(full_input) != len(share):
        raise SizesDoNotFit(f"{name}: {tuple(share)} is no share of {tuple(full_input)}")
    split = [dim for dim, (full, local) in enumerate(zip(full_input, share, strict=True)) if full != local]
    if not split:
        return SizeRule(name, 0, 1, 0)
    dim = split[0]
    if len(split) > 1 or not share[dim] or full_input[dim] % share[dim]:
        raise SizesDoNotFit(f"{name}: {tuple(share)} is no share of {tuple(full_input)}")
    factor = full_input[dim] // share[dim]
    if function in _EXPANDS:
        return SizeRule(name, dim, factor, dim + len(full_output) - len(full_input))
    if function in _VIEWS or function in _UNFLATTENS:
        return SizeRule(name, dim, factor, _viewed_dim(full_input, full_output, dim, factor))
    return SizeRule(name, dim, factor, dim)


def _viewed_dim(full_input: Sequence[int], full_output: Sequence[int], dim: int, factor: int) -> int:
    """The outermost dim of a view's result that is made from ``dim`` of its input and takes the factor."""
    before = math.prod(full_input[:dim])
    until = before * full_input[dim]
    start = 1
    for output_dim, size in enumerate(full_output):
        stop = start * size
        if stop > before and start < until and size > 1 and size % factor == 0:
            return output_dim
        start = stop
    raise SizesDoNotFit(f"view of {tuple(full_input)} as {tuple(full_output)}: no size takes the factor {factor}")


def apply_rule(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rule: SizeRule) -> Any:
    """Run a call that names global sizes on one rank's share.

    Raises:
        SizesDoNotFit: a size that the rule divides is not divisible.
    """
    if rule.factor == 1:
        return function(*args, **kwargs)
    x: Tensor = args[0]
    if function in _VIEWS:
        sizes = _sizes(args[1:], kwargs, ("shape", "size"))
        return function(x, _divided(sizes, x.numel() * rule.factor, rule.output_dim, rule))
    if function in _UNFLATTENS:
        dim, sizes = _named(args, kwargs, ("dim", "sizes"))
        position = dim if dim >= 0 else dim + x.dim()
        factor = rule.factor if position == rule.dim else 1
        total = x.shape[position] * factor
        return function(x, dim, _divided(list(sizes), total, rule.output_dim - position, rule) if factor > 1 else sizes)
    if function in _EXPANDS:
        sizes = _sizes(args[1:], kwargs, ("size",))
        sizes[rule.output_dim] = x.shape[rule.dim]
        return function(x, sizes)
    if function in _SPLITS:
        values = dict(zip(("split", "dim"), args[1:], strict=False)) | kwargs
        dim = values.get("dim", 0)
        size: Any = values.get("split", values.get("split_size_or_sections", values.get("split_size")))
        if dim % x.dim() != rule.dim:
            return function(*args, **kwargs)
        if isinstance(size, int):
            return function(x, _quotient(size, rule), dim)
        return function(x, [_quotient(part, rule) for part in size], dim)
    if function in _NARROWS:
        dim, start, length = _named(args, kwargs, ("dim", "start", "length"))
        if dim % x.dim() != rule.dim:
            return function(*args, **kwargs)
        return function(x, dim, _quotient(start, rule), _quotient(length, rule))
    return function(x, _divided_slice(x, args[1], rule))


def _sizes(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> list[int]:
    given = args if args else next((tuple(kwargs[name]) for name in names if name in kwargs), ())
    if len(given) == 1 and not isinstance(given[0], int):
        given = tuple(given[0])
    return [int(size) for size in given]


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    values = dict(zip(names, args[1:], strict=False)) | kwargs
    return tuple(values[name] for name in names)


def _divided(sizes: list[int], total: int, position: int, rule: SizeRule) -> list[int]:
    known = math.prod([size for size in sizes if size != -1])
    if not 0 <= position < len(sizes) or (-1 in sizes and (not known or total % known)):
        raise SizesDoNotFit(f"{rule.function} to {sizes}: not the sizes of a tensor with {total} elements in all")
    full = [total // known if size == -1 else size for size in sizes]
    full[position] = _quotient(full[position], rule)
    return full


def _divided_slice(x: Tensor, index: Any, rule: SizeRule) -> Any:
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(entry is Ellipsis for entry in entries):
        position = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
        used = sum(entry is not None and entry is not Ellipsis for entry in entries)
        entries[position : position + 1] = [slice(None)] * (x.dim() - used)
    dim = -1
    for position, entry in enumerate(entries):
        if entry is None:
            continue
        dim += 1
        if dim == rule.dim and isinstance(entry, slice):
            bounds = [None if bound is None else _quotient(bound, rule) for bound in (entry.start, entry.stop)]
            if entry.step not in (None, 1):
                raise SizesDoNotFit(f"slice with the step {entry.step} over a split dim")
            entries[position] = slice(*bounds)
    return tuple(entries)


def _quotient(size: int, rule: SizeRule) -> int:
    if size % rule.factor:
        raise SizesDoNotFit(f"{rule.function}: the size {size} is not divisible by {rule.factor}")
    return size // rule.factor


class RescaledSizes(TorchFunctionMode):
    """Applies the rules of one region, call by call, while its module runs.

    Raises:
        SizesDoNotFit: the calls are not those for which the rules were proven.
    """

    def __init__(self, region: str, rules: Sequence[SizeRule]) -> None:
        super().__init__()
        self._region, self._rules, self._position = region, rules, 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._position >= len(self._rules) or not names_sizes(function, args):
            return function(*args, **kwargs)
        rule = self._rules[self._position]
        self._position += 1
        if rule.function != SIZED_FUNCTIONS[function]:
            raise SizesDoNotFit(
                f"{self._region} runs other code now than when its split was proven (call {self._position} that names "
                f"sizes is {SIZED_FUNCTIONS[function]}, not {rule.function}). Let the module compute its sizes from "
                "its own attributes, or exclude it from the split with a plan of module patterns."
            )
        return apply_rule(function, args, kwargs, rule)
