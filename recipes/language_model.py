"""What every language model of the recipes shares: loss, optimizer, schedule and text generation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, final_ratio: float) -> float:
    """Learning rate at ``step`` (from 0) over the peak: linear warmup, then a cosine down to ``final_ratio``."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


class LanguageModel(LightningModule):
    """Next-token training of ``forward(tokens [batch, sequence]) -> logits [batch, sequence, vocab]``.

    Args:
        max_sequence_length: longest sequence that ``forward`` accepts, in tokens.
        optimizer: builds the optimizer from the parameters; AdamW with torch's defaults if not given.
        warmup_steps: optimizer steps of linear warmup.
        final_lr_ratio: learning rate after the last step, as a fraction of the peak.
    """

    def __init__(
        self,
        max_sequence_length: int,
        optimizer: OptimizerFactory | None = None,
        warmup_steps: int = 100,
        final_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__()
        self.max_sequence_length = max_sequence_length
        self.optimizer_factory = AdamW if optimizer is None else optimizer
        self.warmup_steps = warmup_steps
        self.final_lr_ratio = final_lr_ratio

    def init_weights(self, num_layers: int, residual_outputs: str | tuple[str, ...]) -> None:
        """Biases zero, matrices normal with std 0.02, as in GPT-2.

        Matrices whose name ends in ``residual_outputs`` add to the residual stream, two a layer: theirs is smaller by
        ``sqrt(2 * num_layers)``, so that the stream's variance does not grow with depth.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = 0.02 / math.sqrt(2 * num_layers) if name.endswith(residual_outputs) else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy in nats per token of ``(inputs, targets)``, each ``[batch, sequence]``."""
        inputs, targets = batch
        logits = self(inputs)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=batch[0].size(0))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), prog_bar=True, sync_dist=True, batch_size=batch[0].size(0))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch), sync_dist=True, batch_size=batch[0].size(0))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        total_steps = self.trainer.estimated_stepping_batches
        if math.isinf(total_steps):
            raise ValueError(
                "The cosine schedule needs a last step, but the Trainer has none. "
                "Set trainer.max_steps or trainer.max_epochs."
            )
        optimizer = self.optimizer_factory(self.parameters())
        ratio = partial(
            warmup_cosine,
            warmup_steps=self.warmup_steps,
            total_steps=int(total_steps),
            final_ratio=self.final_lr_ratio,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, ratio), "interval": "step"}}

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Sample a continuation of every prompt.

        Args:
            prompt: token ids ``[batch, prompt]``; at least one token.
            max_new_tokens: tokens to add.
            temperature: divides the logits; 0 takes the most likely token.
            generator: CPU source of randomness, so that one seed gives one text on every device.

        Returns:
            Token ids ``[batch, prompt + max_new_tokens]``.
        """
        if prompt.dim() != 2 or prompt.size(1) == 0:
            raise ValueError(
                f"prompt must be [batch, tokens] with at least one token, got shape {tuple(prompt.shape)}."
            )
        if temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {temperature}.")
        was_training = self.training
        self.eval()
        tokens = prompt
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -self.max_sequence_length :])[:, -1].float().cpu()
            if temperature == 0:
                following = logits.argmax(dim=-1, keepdim=True)
            else:
                following = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, following.to(tokens.device)], dim=1)
        self.train(was_training)
        return tokens
