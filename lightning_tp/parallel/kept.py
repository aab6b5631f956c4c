"""Reduced outputs that are kept when activations are recomputed, so that no all-reduce is repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_running = threading.local()


def keep_reduced_outputs(context_fn: Callable[[], _Contexts] | None = None) -> _Contexts:
    """The ``context_fn`` of a ``torch.utils.checkpoint`` that keeps what regions have reduced.

    A recomputation then communicates nothing: each all-reduce of the forward costs the memory of its result, ``[batch,
    sequence, hidden]``, until the backward. The numbers are the same. Uncompiled code only::

        checkpoint(block, x, use_reentrant=False, context_fn=lightning_tp.keep_reduced_outputs)
        model.gradient_checkpointing_enable(  # transformers
            {"use_reentrant": False, "context_fn": lightning_tp.keep_reduced_outputs}
        )

    Args:
        context_fn: Another one to be in force beside it, that of a selective policy: ``functools.partial(
            keep_reduced_outputs, partial(create_selective_checkpoint_contexts, policy))``.

    Returns:
        The contexts of the forward and of the recomputation.
    """
    kept = KeptOutputs()
    inner = (ExitStack(), ExitStack()) if context_fn is None else context_fn()
    return _Running(kept, False, inner[0]), _Running(kept, True, inner[1])


class KeptOutputs:
    """The reduced outputs of one checkpointed call, in their order."""

    def __init__(self) -> None:
        self._outputs: list[tuple[Tensor, int]] = []
        self._recomputes = False
        self._position = 0

    def start(self, recomputes: bool) -> None:
        self._recomputes, self._position = recomputes, 0

    def next(self) -> Tensor | None:
        """What was kept of the next reduction; None in the forward, and where code has changed it since, in place."""
        if not self._recomputes or self._position >= len(self._outputs):
            return None
        output, version = self._outputs[self._position]
        self._position += 1
        return output if output._version == version else None

    def keep(self, output: Tensor) -> None:
        """Note the result of a reduction in the forward."""
        if not self._recomputes:
            detached = output.detach()
            self._outputs.append((detached, detached._version))


def kept_outputs() -> KeptOutputs | None:
    """Those of the checkpointed call that runs on this thread, if it keeps any."""
    return getattr(_running, "kept", None)


class _Running(AbstractContextManager["_Running"]):
    """Reductions inside are kept, or taken from what was kept; may be entered again, for a second backward."""

    def __init__(self, kept: KeptOutputs, recomputes: bool, inner: AbstractContextManager[Any]) -> None:
        self._kept, self._recomputes, self._inner = kept, recomputes, inner
        self._before: KeptOutputs | None = None

    def __enter__(self) -> _Running:
        self._inner.__enter__()
        self._before = kept_outputs()
        self._kept.start(self._recomputes)
        _running.kept = self._kept
        return self

    def __exit__(self, *error: Any) -> None:
        _running.kept = self._before
        self._inner.__exit__(*error)
