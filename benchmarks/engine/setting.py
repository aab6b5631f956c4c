"""What is trained: one Llama-style model, one batch, and the values that every peer starts from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.llama import LlamaModule

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Setting:
    """Sizes of a model and its batch.

    Attributes:
        hidden_size: A multiple of ``head_size`` times the number of ranks.
        batch: Samples of a step, over all ranks; a multiple of the number of ranks.
        sequence: Tokens of a sample.
        double: float64 in place of float32.
    """

    hidden_size: int
    batch: int = 4
    sequence: int = 512
    layers: int = 4
    head_size: int = 64
    words: int = 256
    double: bool = False

    @property
    def heads(self) -> int:
        return self.hidden_size // self.head_size

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.sequence

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    def model(self) -> LlamaModule:
        """The whole model; its values are the same whenever and wherever it is built."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = LlamaModule(
                self.words,
                self.hidden_size,
                num_layers=self.layers,
                num_heads=self.heads,
                num_kv_heads=self.heads,
                max_sequence_length=self.sequence,
            )
        return model.to(self.dtype)

    def tokens(self) -> Tensor:
        """The batch ``[batch, sequence + 1]``: inputs and, one place on, targets."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.words, (self.batch, self.sequence + 1), generator=generator)
