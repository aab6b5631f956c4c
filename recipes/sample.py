"""Text written by the trained model."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from recipes.language_model import LanguageModel


class SampleText(Callback):
    """Continue ``prompt`` at the end of training; print the text and write it to ``sample.txt`` in the run's folder.

    Every process generates, because the model may be spread over them, and all draw the same bytes from ``seed``.
    Rank zero prints and writes.

    Args:
        prompt: text to continue; not empty.
        max_new_tokens: bytes to add.
        temperature: see :meth:`LanguageModel.generate`.
        seed: of the generator that draws the bytes.
    """

    def __init__(self, prompt: str = "\n", max_new_tokens: int = 240, temperature: float = 0.8, seed: int = 0) -> None:
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.seed = seed
        self.text = ""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        prompt = torch.tensor([list(self.prompt.encode())], device=pl_module.device)
        generator = torch.Generator().manual_seed(self.seed)
        tokens = pl_module.generate(prompt, self.max_new_tokens, self.temperature, generator)
        self.text = bytes(tokens[0].tolist()).decode(errors="replace")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not earlier: the progress bar and the tables of other callbacks come first.
        if trainer.is_global_zero:
            Path(trainer.default_root_dir, "sample.txt").write_text(self.text)
            print(f"\nA sample of the trained model:\n\n{self.text}\n", flush=True)
