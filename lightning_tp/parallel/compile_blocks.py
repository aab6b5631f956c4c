"""Compile a model block by block, after it is split and before it is sharded over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_tp.data_parallel import repeated_blocks


def compile_blocks(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile each repeated block of ``model``, in place, and the whole model where nothing repeats.

    Blocks of one class share what is compiled for the first of them. A block that is compiled already stays as it is.

    Args:
        model: A model that :func:`lightning_tp.parallelize` has split.
        options: Arguments of ``torch.compile``.
    """
    for block in repeated_blocks(model) or [model]:
        if block._compiled_call_impl is None:
            block.compile(**options)
