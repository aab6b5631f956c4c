"""Sizes and joining of batches, whatever structure they have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors of a nested batch (mappings, sequences, dataclasses), in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors(value)
    elif dataclasses.is_dataclass(batch):
        for field in dataclasses.fields(batch):
            yield from tensors(getattr(batch, field.name))


def sample_count(batch: Any) -> int | None:
    """Size of dim 0 of the first tensor that has dims; None if there is none."""
    return next((tensor.shape[0] for tensor in tensors(batch) if tensor.ndim > 0), None)


def token_count(batch: Any) -> int | None:
    """Number of elements of the first integer tensor of two or more dims; None if there is none."""
    return next((tensor.numel() for tensor in tensors(batch) if tensor.ndim >= 2 and _is_integer(tensor)), None)


def concatenate(batches: Sequence[Any]) -> Any:
    """Join batches of one structure along dim 0 of their tensors; lists of plain values are joined end to end.

    Raises:
        ValueError: the batches have different sizes, so that a mean over batches is no mean over samples; or values
            that cannot be joined differ.
    """
    first = batches[0]
    if isinstance(first, Tensor) and first.ndim > 0:
        sizes = [tensor.shape[0] for tensor in batches]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"batches of one step have sizes {sizes}, so a mean over data-parallel ranks is no mean over samples. "
                "Use drop_last=True in the dataloader, or fewer steps."
            )
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        joined = {key: concatenate([batch[key] for batch in batches]) for key in first}
        return type(first)(joined)  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        if not any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in first):
            return type(first)(item for batch in batches for item in batch)
        items = [concatenate(column) for column in zip(*batches, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if any(bool(other != first) for other in batches[1:]):
        raise ValueError(
            f"values of type {type(first).__name__} differ between the batches of one step and cannot be joined. "
            "Put them into tensors with a batch dim."
        )
    return first


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
