"""Train a few steps through the Trainer and record the numbers that must not depend on the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_tp.dropout import DropoutOff
from lightning_tp.errors import ParallelConfigError
from lightning_tp.parallel.local_parameters import local_tensor
from lightning_tp.plan.agree import PlanSource
from lightning_tp.plan.find import Unsplittable
from lightning_tp.plan.sharding_plan import ShardingPlan
from lightning_tp.plan.vocabulary import VocabularyParallel
from lightning_tp.strategy import TensorParallelStrategy

Batches = list[Any]
TestPrecision = Literal["64-true", "32-true"]


@dataclass
class TrainingRecord:
    """What a run has given.

    Attributes:
        losses: By step, averaged over data-parallel ranks.
        grad_norms: By step, of all gradients together.
        grads: By step the whole gradients, by name.
        parameters: The whole parameters at the end, by name.
        plan: The plan that was in force, if the run was parallel.
        parameters_on_rank: Number of parameter elements that this rank held.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    plan: ShardingPlan | None = None
    parameters_on_rank: int = 0


class Recorder(pl.Callback):
    """Records whole tensors on every rank."""

    def __init__(self) -> None:
        self.record = TrainingRecord()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if isinstance(trainer.strategy, TensorParallelStrategy):
            self.record.plan = trainer.strategy.plan
        self.record.parameters_on_rank = sum(local_tensor(p).numel() for p in module.parameters())

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
    """A copy of ``tensor``; of a DTensor the global one (collective)."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def data_parallel_part(batch: Any, part: int, parts: int) -> Any:
    """Part ``[B / parts, ...]`` of every tensor ``[B, ...]`` in ``batch``; what is no tensor, or has no dims, stays.

    Raises:
        ParallelConfigError: a tensor cannot be split into equal parts.
    """

    def share(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            return tensor
        if tensor.shape[0] % parts:
            raise ParallelConfigError(
                f"A tensor of the batch has the shape {tuple(tensor.shape)}, and dim 0 cannot be split evenly over "
                f"{parts} data-parallel ranks. Make batches of a multiple of {parts} samples."
            )
        return tensor.chunk(parts)[part]

    return batch if parts == 1 else apply_to_collection(batch, Tensor, share)


def train(
    factory: Callable[[], pl.LightningModule],
    batches: Batches,
    precision: TestPrecision,
    tensor_parallel_size: int = 1,
    data_parallel_size: int = 1,
    callbacks: tuple[pl.Callback, ...] = (),
    plan: PlanSource = "auto",
    unsplittable: Unsplittable = "error",
    vocabulary_parallel: VocabularyParallel = "auto",
    dropout: bool = True,
    compile: bool | Mapping[str, Any] = False,
    **trainer_options: Any,
) -> TrainingRecord:
    """Train on ``batches``, each for all data-parallel ranks: split along dim 0, one part a rank.

    On one device if both sizes are 1, else on the ranks of the running process group. The learning rates and the
    initial weights come from ``factory`` after the seed is set. ``dropout=False`` switches every dropout off.
    """
    pl.seed_everything(0, verbose=False)
    world = tensor_parallel_size * data_parallel_size
    dtype = {"64-true": torch.float64, "32-true": torch.float32}[precision]
    strategy: Any = "auto"
    own = batches
    if world > 1:
        strategy = TensorParallelStrategy(
            tensor_parallel_size,
            data_parallel_size,
            plan=plan,
            unsplittable=unsplittable,
            vocabulary_parallel=vocabulary_parallel,
            compile=compile,
        )
        part = torch.distributed.get_rank() // tensor_parallel_size
        own = [data_parallel_part(batch, part, data_parallel_size) for batch in batches]
    recorder = Recorder()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        precision=precision,
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
    first = next(module.parameters(), None)
    if first is None:
        raise ValueError("The factory made a module without parameters.")
    if first.dtype != dtype:
        raise ValueError(f"The factory made parameters of {first.dtype}; for {precision} they must be {dtype}.")
    with nullcontext() if dropout else DropoutOff():
        trainer.fit(module, DataLoader(own, batch_size=None))  # type: ignore[arg-type]
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
        "loss": relative(as_double(a.losses), as_double(b.losses)),
        "grad norm": relative(as_double(a.grad_norms), as_double(b.grad_norms)),
        "gradients": grads,
        "parameters": max(relative(a.parameters[name], b.parameters[name], floor) for name in a.parameters),
    }


def as_double(numbers: float | list[float]) -> Tensor:
    """Numbers of Python as a tensor of the precision that they have."""
    return torch.tensor(numbers, dtype=torch.float64)


def relative(a: Tensor, b: Tensor, floor: float = 1e-30) -> float:
    """``max|a - b| / max|b|``; below ``floor`` a value counts as zero but for rounding."""
    assert a.shape == b.shape
    difference = float((a.detach() - b.detach()).abs().max() / b.detach().abs().max().clamp(min=floor))
    return difference if difference == difference else float("inf")
