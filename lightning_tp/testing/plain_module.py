"""Any module as a LightningModule, so that the Trainer can train it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_tp.errors import ParallelConfigError
from lightning_tp.plan.graph import tensors_in

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
Loss = Callable[[Any, Any], Tensor]


class PlainModule(pl.LightningModule):
    """Any module, as a LightningModule.

    Args:
        module: What is trained. A tuple or list is its positional arguments, a mapping its keyword arguments.
        optimizer: Makes the optimizer from the module's parameters.
        loss: ``loss(output, batch)``.
    """

    prefix = "module."
    """Stands before the names of the module's own parameters."""

    def __init__(self, module: nn.Module, optimizer: OptimizerFactory, loss: Loss) -> None:
        super().__init__()
        self.module = module
        self.make_optimizer, self.make_loss = optimizer, loss

    def forward(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self.module(**batch)
        return self.module(*batch) if isinstance(batch, (tuple, list)) else self.module(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.make_loss(self(batch), batch)

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(self.module.parameters())


def default_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """AdamW, with an epsilon above rounding: gradients that are zero but for rounding do not decide a step."""
    return AdamW(parameters, lr=1e-3, eps=1e-4)


def default_loss(output: Any, batch: Any) -> Tensor:
    """The model's own loss, or a fixed random mean over all floating tensors ``[batch, ...]`` of its output."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    total: Any = 0.0
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors_in(output):
        if tensor.is_floating_point() and tensor.requires_grad:
            # The weights repeat over the batch: the mean over data-parallel parts is that of the whole.
            weights = torch.randn(tensor.shape[1:], generator=generator, dtype=torch.float64).to(tensor)
            total = total + (tensor * weights).mean()
    if not isinstance(total, Tensor):
        raise ParallelConfigError("The module returns no tensor to train on. Give `loss`.")
    return total
