"""Embeddings and output heads split over the vocabulary.

With ``R`` ranks, ``T`` tokens, ``V`` words and ``H`` features; rank r has the r-th chunk of ``ceil(V/R)`` words,
of which the last may be shorter (arXiv:1909.08053, section 3):

=========  ==================  =======================  ==============  =========================================
module     input (per rank)    weight (per rank)        output          communication
=========  ==================  =======================  ==============  =========================================
embedding  ids ``[T]``         ``[about V/R, H]``       ``[T, H]``      forward: all-reduce of ``[T, H]``
head       ``[T, H]``          ``[about V/R, H]``       ``[T, V]``      forward: all-gather of ``[T, V/R]``;
                                                                        backward: all-reduce of ``[T, H]``
=========  ==================  =======================  ==============  =========================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_tp.parallel.collectives import copy, gather_features, reduce
from lightning_tp.parallel.local_parameters import ParallelState
from lightning_tp.parallel.scope import Entered, Scope


@dataclass(frozen=True)
class VocabularyRole:
    """A rank's words.

    Attributes:
        first: Its first word.
        stop: The word after its last one.
        words: Number of all words.
        scope: In force while the module's own forward runs.
    """

    group: dist.ProcessGroup
    first: int
    stop: int
    words: int
    scope: Scope


class VocabularyEmbedding(nn.Module):
    """Mixin for an embedding that holds some of its rows: words of other ranks count as zero, and all are summed."""

    _parallel: ParallelState

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        role: VocabularyRole = self._parallel.role
        (ids,) = (*args, *kwargs.values())
        _check_range(ids, role.words)
        with Entered(role.scope):
            return reduce(own_words(super().forward, ids, role.first, role.stop), role.group)


class VocabularyHead(nn.Module):
    """Mixin for an output head that computes the logits of some words: they are gathered."""

    _parallel: ParallelState

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        role: VocabularyRole = self._parallel.role
        (x,) = (*args, *kwargs.values())
        return gather_features(super().forward(copy(x, role.group)), role.words, role.group)


def own_words(lookup: Callable[[Tensor], Tensor], ids: Tensor, first: int, stop: int) -> Tensor:
    """The vectors ``[..., H]`` of the words ``ids [...]`` from ``first`` to ``stop``, and zeros for all others.

    Args:
        lookup: Gives the vectors of ids that are counted from ``first``.
    """
    outside = (ids < first) | (ids >= stop)
    vectors = lookup((ids - first).masked_fill(outside, 0))
    return vectors.masked_fill(outside.unsqueeze(-1), 0)


def local_padding(padding: int | None, first: int, stop: int) -> int | None:
    """The padding word of a rank's embedding, if it has it."""
    return padding - first if padding is not None and first <= padding < stop else None


def _check_range(ids: Tensor, words: int) -> None:
    """A word that no rank has would silently be zero."""
    if not ids.numel():
        return
    legal = ((ids >= 0) & (ids < words)).all()
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(legal, f"an id is not one of the {words} words of the embedding")
    elif not legal:
        raise IndexError(f"ids reach from {int(ids.min())} to {int(ids.max())}, and the embedding has {words} words")
