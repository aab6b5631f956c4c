"""Train a few steps through the Trainer and record the numbers that must not depend on the layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

import lightning_tp

Batches = list[Any]


@dataclass
class TrainingRecord:
    """What a run has given: per step the loss, the gradient norm and every gradient; the parameters at its end."""

    losses: list[float]
    grad_norms: list[float]
    grads: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


class Recorder(pl.Callback):
    """Records whole tensors on every rank."""

    def __init__(self) -> None:
        self.record = TrainingRecord([], [], [], {})

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        named = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
        self.record.grads.append({name: whole(grad) for name, grad in named})
        norm = torch.nn.utils.get_total_norm([grad for _, grad in named])
        self.record.grad_norms.append(float(whole(norm)))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.record.parameters = {name: whole(p) for name, p in module.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(
    factory: Callable[[], pl.LightningModule],
    batches: Batches,
    precision: str,
    tensor_parallel_size: int = 1,
    data_parallel_size: int = 1,
    callbacks: tuple[pl.Callback, ...] = (),
    **trainer_options: Any,
) -> TrainingRecord:
    """Train on ``batches``, each for all data-parallel ranks: split along dim 0, one part a rank.

    On one device if both sizes are 1, else on the ranks of the running process group. The learning rates and the
    initial weights come from ``factory`` after the seed is set.
    """
    pl.seed_everything(0, verbose=False)
    world = tensor_parallel_size * data_parallel_size
    dtype = {"64-true": torch.float64, "32-true": torch.float32}[precision]
    strategy: Any = "auto"
    own = batches
    if world > 1:
        strategy = lightning_tp.TensorParallelStrategy(tensor_parallel_size, data_parallel_size)
        part = torch.distributed.get_rank() // tensor_parallel_size
        own = [tree_map(lambda x: x.chunk(data_parallel_size)[part], batch) for batch in batches]
    recorder = Recorder()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        precision=precision,  # type: ignore[arg-type]
        max_epochs=1,
        callbacks=[recorder, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **trainer_options,
    )
    with trainer.init_module():
        module = factory()
    assert next(module.parameters()).dtype == dtype
    trainer.fit(module, DataLoader(own, batch_size=None))
    return recorder.record


def largest_difference(a: TrainingRecord, b: TrainingRecord, floor: float = 1e-30) -> dict[str, float]:
    """For each kind of number the largest difference, relative to the largest value of its tensor."""
    assert len(a.losses) == len(b.losses) > 0
    assert a.parameters.keys() == b.parameters.keys()
    grads = 0.0
    for left, right in zip(a.grads, b.grads, strict=True):
        assert left.keys() == right.keys()
        grads = max(grads, *(relative(left[name], right[name], floor) for name in left))
    return {
        "loss": relative(torch.tensor(a.losses).double(), torch.tensor(b.losses).double()),
        "grad norm": relative(torch.tensor(a.grad_norms).double(), torch.tensor(b.grad_norms).double()),
        "gradients": grads,
        "parameters": max(relative(a.parameters[name], b.parameters[name], floor) for name in a.parameters),
    }


def relative(a: Tensor, b: Tensor, floor: float = 1e-30) -> float:
    """``max|a - b| / max|b|``; below ``floor`` a value counts as zero but for rounding."""
    assert a.shape == b.shape
    return float((a - b).abs().max() / b.abs().max().clamp(min=floor))
