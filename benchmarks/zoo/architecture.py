"""What the zoo knows of one architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, SAMPLES = 131, 16, 4  # no size divides the vocabulary
_NOISE = 0.1  # about 1 / sqrt(hidden size): what a linear gives is then of the scale of what it reads


@dataclass(frozen=True)
class Architecture:
    """A small model with a batch for it.

    Attributes:
        name: As it stands in the table.
        build: Makes the model; picklable.
        batch: Makes keyword arguments for its forward, ``SAMPLES`` samples; picklable.
        note: What is special about it.
        mechanism: What the plan needs to split it.
        fast: Whether the test suite runs it: one for each mechanism.
        precision: In which it is compared; float32 where its code has no float64.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    note: str = ""
    mechanism: str = "pairs"
    fast: bool = False
    precision: Literal["64-true", "32-true"] = "64-true"


def unsettled(make: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    """``make(*arguments)`` with noise on every parameter that is trained.

    Fresh models hide mistakes: biases of zero and norm weights of one are the same in every order, and weights of 0.02
    leave attention uniform at this width, so that the gradients of queries and keys vanish.
    """
    model = make(*arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=_NOISE)
    return model


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def tokens() -> Tensor:
    """Token ids ``[SAMPLES, LENGTH]``; the first ids are left out, since they often mean padding or begin and end."""
    return torch.randint(4, VOCABULARY, (SAMPLES, LENGTH), generator=_generator())


def causal_batch() -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def encoder_batch() -> dict[str, Any]:
    """Tokens with padding at the end of the first sample."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def image_batch(size: int = 32) -> dict[str, Any]:
    images = torch.randn(SAMPLES, 3, size, size, generator=_generator())
    return {"pixel_values": images, "labels": torch.arange(SAMPLES) % 2}


def image_and_text_batch(size: int = 32) -> dict[str, Any]:
    return {"pixel_values": image_batch(size)["pixel_values"], "input_ids": tokens(), "return_loss": True}


def sound_batch(samples: int = 1600) -> dict[str, Any]:
    return {"input_values": torch.randn(SAMPLES, samples, generator=_generator())}


def features_batch(width: int = 64, length: int = LENGTH) -> dict[str, Any]:
    return {"x": torch.randn(SAMPLES, length, width, generator=_generator())}
