"""What a module runs on while its split is proven: randomised parameters, captured inputs, changed attributes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_tp.plan.meta import compact, is_compact
from lightning_tp.plan.sharding_plan import AttributeChange
from lightning_tp.plan.trace import ModuleCall

Slots = list[tuple[nn.Module, str, nn.Parameter]]
"""Where parameters stand: module, name in it, parameter."""


def has_gradient(tensor: Tensor) -> bool:
    """Whether the dtype of ``tensor`` is one that gradients exist for."""
    return tensor.is_floating_point() or tensor.is_complex()


def randomised(parameter: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """``parameter`` with noise of its own scale added, so that zeros and ones hide nothing."""
    if is_compact(parameter):
        return compact(parameter, dtype, generator)
    if not has_gradient(parameter):
        return parameter.detach().clone()
    dtype = dtype.to_complex() if parameter.is_complex() else dtype
    value = parameter.detach().to(dtype)
    scale = float(value.std()) if value.numel() > 1 else 0.0
    noise = torch.randn(value.shape, dtype=dtype, generator=generator).to(value.device)
    return value + noise * max(scale, 0.02)


def prepared_inputs(call: ModuleCall, dtype: torch.dtype, generator: torch.Generator | None) -> tuple[Any, Any]:
    """The arguments of ``call`` as leaves of ``dtype``, with noise in those that carry gradients.

    A tensor that is passed twice is one leaf.
    """
    known: dict[int, Tensor] = {}

    def prepared(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in known:
            known[id(value)] = leaf_of(value)
        return known[id(value)]

    def leaf_of(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value.detach()
        leaf = value.detach().to(dtype)
        if generator is not None and value.requires_grad:
            noise = torch.randn(leaf.shape, dtype=dtype, generator=generator).to(leaf.device)
            leaf = leaf + noise * leaf.std().clamp(min=1e-3) if leaf.numel() > 1 else leaf + noise
        return leaf.requires_grad_(value.requires_grad)

    return tree_map(prepared, (call.args, call.kwargs))


@contextmanager
def swapped(module: nn.Module, slots: Slots, tensors: Mapping[int, Tensor], dtype: torch.dtype) -> Iterator[None]:
    """``module`` runs on ``tensors`` (by id of the parameter) and on buffers of ``dtype``."""
    buffers = [(m, dict(m._buffers)) for m in module.modules()]
    for holder, key, parameter in slots:
        holder._parameters[key] = tensors[id(parameter)]  # type: ignore[assignment]
    for holder, entries in buffers:
        for key, buffer in entries.items():
            if buffer is not None:
                holder._buffers[key] = buffer.to(dtype, copy=True) if buffer.is_floating_point() else buffer.clone()
    try:
        yield
    finally:
        for holder, key, parameter in slots:
            holder._parameters[key] = parameter
        for holder, entries in buffers:
            holder._buffers.update(entries)


@contextmanager
def changed_attributes(model: nn.Module, changes: Sequence[AttributeChange]) -> Iterator[None]:
    """Set the attributes for the time of the context; configuration objects are copied, not changed."""
    saved: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for change in changes:
            attributes = vars(model.get_submodule(change.module))
            holder, _, field = change.attribute.rpartition(".")
            saved.append((attributes, holder or field, attributes[holder or field]))
            if holder:
                attributes[holder] = copy.copy(attributes[holder])
                vars(attributes[holder])[field] = change.value
            else:
                attributes[field] = change.value
        yield
    finally:
        for attributes, name, value in reversed(saved):
            attributes[name] = value
