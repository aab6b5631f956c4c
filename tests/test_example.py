"""The model is probed on its own data without leaving a trace, and without using anything up."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

import lightning_tp
from lightning_tp.testing import RankPool

SAMPLES = 8


class Model(pl.LightningModule):
    """Changes everything that a training step may change, and keeps account."""

    def __init__(self, example: bool = False) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.metric = MeanMetric()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.history: list[float] = []
        self.by_name: dict[str, float] = {}
        self.count = 0
        self.seen: list[float] = []
        self.forwards = 0
        if example:
            self.example_input_array = torch.randn(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.down(torch.relu(self.norm(self.up(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch if not isinstance(batch, dict) else batch["first"]
        loss = self(x + 0 * torch.randn_like(x) * random.random() * np.random.rand()).square().mean()
        self.metric.update(loss.detach())
        self.steps += 1
        self.history.append(float(loss))
        self.by_name["loss"] = float(loss)
        self.count += 1
        self.late = True
        self.seen += x[:, 0].tolist()
        self.log("loss", loss)
        self.log_dict({"again": loss})
        if self.logger is not None:
            self.logger.log_metrics({"direct": float(loss)}, step=self.count)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class AtStart(pl.Callback):
    """What the model and the random state are when training begins, which is after the probe."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.state = {
            "history": list(pl_module.history),
            "by_name": dict(pl_module.by_name),
            "count": pl_module.count,
            "late": hasattr(pl_module, "late"),
            "seen": list(pl_module.seen),
            "forwards": pl_module.forwards,
            "steps": int(pl_module.steps),
            "batches": int(pl_module.norm.num_batches_tracked),
            "running mean": pl_module.norm.running_mean.tolist(),
            "metric": (float(pl_module.metric.weight), pl_module.metric.update_called),
            "grads": [p.grad is None for p in pl_module.parameters()],
            "training": [m.training for m in pl_module.modules()],
            "log": "log" in vars(pl_module),
        }


class Stream(IterableDataset):
    def __init__(self, data: Tensor) -> None:
        self.data, self.started = data, 0

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        self.started += 1
        return ((row,) for row in self.data)


def loader(kind: str) -> Any:
    data = torch.arange(SAMPLES * 4.0).reshape(SAMPLES, 4)
    if kind == "shuffled":
        return DataLoader(TensorDataset(data), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    if kind == "stream":
        return DataLoader(Stream(data), batch_size=4)
    if kind == "dict":
        return {"first": DataLoader(TensorDataset(data), batch_size=4)}
    if kind == "list":
        return DataLoader([(data[:4],), (data[4:],)], batch_size=None)
    return DataLoader(TensorDataset(data), batch_size=4)


def fit(
    kind: str, folder: str, split: bool, **options: Any
) -> tuple[dict[str, Any], list[float], list[Any], list[str]]:
    os.environ.pop("PL_GLOBAL_SEED", None)  # left by another test: Lightning would seed every rank again from it
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    module = Model(example=kind == "example")
    strategy: Any = lightning_tp.TensorParallelStrategy(2, **options) if split else "auto"
    start = AtStart()
    logger = CSVLogger(folder, name=f"{kind}{split}", version=0, flush_logs_every_n_steps=1)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2 if split else 1,
        max_epochs=1,
        callbacks=[start],
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(kind))
    regions = [region.rows[0] for region in strategy.plan.regions] if split else []
    after = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    columns = [] if trainer.global_rank else sorted(logger.experiment.metrics_keys)
    return start.state | {"columns": columns}, module.seen, after, regions


@pytest.mark.parametrize("kind", ["plain", "shuffled", "stream", "dict", "list", "example"])
def test_the_probe_leaves_no_trace(ranks2: RankPool, tmp_path: Any, kind: str) -> None:
    expected, seen, after, _ = fit(kind, str(tmp_path), False)
    for rank, found in enumerate(ranks2.run(fit, kind, str(tmp_path), True)):
        assert found[0] == expected | ({"columns": []} if rank else {})
        assert found[1] == seen and len(seen) == SAMPLES
        assert found[2] == after
        assert found[3] == []  # a batch norm over the split features: stays whole, and is right


def planned(folder: str, with_plan: bool) -> int:
    plan = lightning_tp.ShardingPlan(tensor_parallel_size=2)
    start, *_ = fit("plain", folder, True, **({"plan": plan} if with_plan else {}))
    return int(start["forwards"])


def test_a_given_plan_means_that_nothing_is_run(ranks2: RankPool, tmp_path: Any, monkeypatch: Any) -> None:
    assert ranks2.run(planned, str(tmp_path), True) == [0, 0]
    assert ranks2.run(ran_by, "training_step") == ranks2.run(ran_by, "example") == [True, True]


class Counting(Model):
    """Counts calls in a place that is not put back."""

    calls: dict[str, int] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Counting.calls["training_step"] = Counting.calls.get("training_step", 0) + 1
        return super().training_step(batch, batch_idx)

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls["forward"] = Counting.calls.get("forward", 0) + 1
        return super().forward(x)


def ran_by(source: str) -> bool:
    """Whether rank zero, and only rank zero, ran the model once more than it trained, through ``source``."""
    Counting.calls = {}
    module = Counting(example=source == "example")
    trainer = pl.Trainer(
        strategy=lightning_tp.TensorParallelStrategy(2),
        accelerator="cpu",
        devices=2,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader("plain"))
    extra = 1 if trainer.global_rank == 0 else 0
    steps = 1 + (extra if source == "training_step" else 0)
    return Counting.calls["training_step"] == steps and Counting.calls["forward"] >= 1 + extra


class Logging(pl.LightningModule):
    """Logs a number made from the hidden features, which no loss depends on."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.up, self.down, self.hidden = nn.Linear(4, 8), nn.Linear(8, 4), hidden

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.up(x))
        return self.down(hidden), hidden

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y, hidden = self(batch[0])
        if self.hidden:
            self.log("hidden", hidden.mean())
        return y.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def logged_on_ranks(hidden: bool, split: bool = True) -> tuple[int, dict[str, float]]:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        strategy=lightning_tp.TensorParallelStrategy(2) if split else "auto",
        accelerator="cpu",
        devices=2 if split else 1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Logging(hidden), loader("plain"))
    strategy: Any = trainer.strategy
    regions = len(strategy.plan.regions) if split else 0
    return regions, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_features_that_are_logged_stay_whole_and_their_number_right(ranks2: RankPool) -> None:
    _, expected = logged_on_ranks(True, split=False)
    assert ranks2.run(logged_on_ranks, False) == [(1, {})] * 2
    for regions, found in ranks2.run(logged_on_ranks, True):
        assert regions == 0
        assert found == pytest.approx(expected, rel=1e-6)
