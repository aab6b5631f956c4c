"""Records loss and gradient norm of every training step, for comparing two runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_tp.callbacks.run_info import TensorParallel, data_parallel
from lightning_tp.dropout import DropoutOff
from lightning_tp.layout import DATA_AXIS


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step: the loss of the global batch, and the norm of all gradients before clipping."""

    loss: float
    grad_norm: float


class StepRecorder(pl.Callback):
    """Records each optimizer step, with dropout switched off and random numbers that depend on the step only.

    Every rank gathers the same numbers, so every rank must have this callback. It records:

    - the loss that ``training_step`` returns, averaged over micro-batches and over data-parallel ranks;
    - the gradient norm over the parameters of the optimizers that step, from full gradients in float64.

    Args:
        seed: Each batch starts from a random state that is made of this seed and the batch's number.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.records: list[StepRecord] = []
        self.initial_weights: dict[str, str] = {}
        """SHA-256 of each tensor of the model's state, by name, before the first step."""
        self.dropout = 0.0
        """The largest dropout probability that was switched off."""
        self.split_share: float | None = None
        """Share of the matmul parameters that is split over ``tp``; None under other strategies."""
        self._mode: DropoutOff | None = None
        self._global_step = 0
        self._loss = 0.0
        self._squares = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._global_step = trainer.global_step
        if isinstance(trainer.strategy, TensorParallel):
            self.split_share = trainer.strategy.parameter_summary().split_share
        state = trainer.strategy.lightning_module_state_dict()
        self.initial_weights = {name: _digest(value) for name, value in state.items() if isinstance(value, Tensor)}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        torch.manual_seed(self.seed + batch_idx)
        self._mode = DropoutOff()
        self._mode.__enter__()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._squares += grad_norm(optimizer) ** 2

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._leave()
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is None:
            raise ValueError("verify compares losses, but training_step returned none. Return the loss.")
        # With accumulation, Lightning has already divided the loss by the number of micro-batches.
        self._loss += _data_parallel_mean(trainer, loss.detach().double())
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self.records.append(StepRecord(self._loss, self._squares**0.5))
        self._loss = self._squares = 0.0

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)
            self.dropout = max(self.dropout, mode.largest_probability)


@torch.no_grad()
def grad_norm(optimizer: Optimizer) -> float:
    """Norm of the gradients of all parameters of ``optimizer``, from full gradients in float64.

    Collective if gradients are DTensors: all ranks must call it, and all get the same value.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = (_full(parameter.grad) for parameter in parameters if parameter.grad is not None)
    return sum(gradient.double().square().sum().item() for gradient in gradients) ** 0.5


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _digest(tensor: Tensor) -> str:
    data = _full(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _data_parallel_mean(trainer: pl.Trainer, value: Tensor) -> float:
    """Mean of a scalar over the data-parallel ranks. Tensor-parallel peers are not averaged: they must agree."""
    size = data_parallel(trainer).size
    if size > 1:
        mesh = getattr(trainer.strategy, "device_mesh", None)
        group = dist.group.WORLD if mesh is None else mesh.get_group(DATA_AXIS)
        dist.all_reduce(value, group=group)
        value = value / size
    return value.item()
