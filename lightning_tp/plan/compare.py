"""Comparing what the ranks give together with what the unsplit code gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest relative difference of a proof. float64 runs agree to about 1e-15; the margin is for code that rounds to
float32 on the way, and three orders of magnitude below what a wrong split gives. Half precision rounds everywhere."""
_LARGEST_FLOOR = 0.2


class NotProven(Exception):
    """The ranks together do not give what the unsplit region gives."""


def rounding_floor(grads: Sequence[Tensor | None], dtype: torch.dtype) -> float:
    """Below this a gradient counts as zero but for rounding (a key's bias under softmax)."""
    largest = max((float(grad.abs().max()) for grad in grads if grad is not None and grad.numel()), default=0.0)
    return largest * min(100 * torch.finfo(dtype).eps / TOLERANCE[dtype], _LARGEST_FLOOR)


def scattered(share: Tensor | None, whole: Tensor, dim: int, index: list[int]) -> Tensor | None:
    """A rank's ``share`` of a gradient in a tensor of zeros like ``whole``."""
    if share is None:
        return None
    return torch.zeros_like(whole).index_add_(dim, torch.tensor(index, device=whole.device), share)


def difference(expected: Tensor | None, parts: Sequence[Tensor | None], floor: float = 0.0) -> float:
    """``max|sum(parts) - expected|`` relative to ``max(max|expected|, floor)``.

    Infinite where shapes differ, only one side exists, or a number is not finite.
    """
    present = [part for part in parts if part is not None]
    if expected is None or not present:
        return 0.0 if expected is None and not present else float("inf")
    if any(part.shape != expected.shape for part in present):
        return float("inf")
    if not expected.numel():
        return 0.0
    largest = (torch.stack(present).sum(0) - expected).abs().max()
    scale = expected.abs().max().clamp(min=floor)
    if not torch.isfinite(largest) or not torch.isfinite(scale):
        return float("inf")
    return float(largest / scale) if scale > 0 else float(largest)
