"""The strategy under the Trainer: what a Lightning user relies on holds as on one device."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

import lightning_tp
from lightning_tp.parallel.local_parameters import ParallelModule
from lightning_tp.testing import RankPool, TrainingRecord, largest_difference, relative, train, whole
from recipes.gpt import GPTModule
from recipes.llama import LlamaModule
from tests.models import LENGTH, WIDTH, FeedForward, SelfAttention, Stack

SAMPLES, BATCH = 16, 4


class Regression(pl.LightningModule):
    """A small model with a metric, and options for what a test is about."""

    def __init__(self, optimizer: Any = None, frozen: str = "", recompute: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = Stack(SelfAttention("chunk"), FeedForward())
        self.optimizer = optimizer or partial(torch.optim.AdamW, lr=1e-2, eps=1e-6)
        self.recompute, self.dropout = recompute, dropout
        self.error = MeanSquaredError()
        self.seen: list[float] = []
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(not (frozen and frozen in name))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self.net, x, use_reentrant=False)
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen += x[:, 0, 0].tolist()
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.error(self(x).flatten(), y.flatten())
        self.log("error", self.error, on_epoch=True)
        self.log("mean", y.mean(), sync_dist=True)
        self.log("sum", y.sum(), sync_dist=True, reduce_fx="sum")
        self.log("largest", y.max(), sync_dist=True, reduce_fx="max")

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for p in self.parameters() if p.requires_grad])


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    shapes = ((SAMPLES, LENGTH, WIDTH), (SAMPLES, LENGTH, 8))
    return TensorDataset(*(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes))


def trainer(sizes: tuple[int, int] | None, vocabulary_parallel: bool = False, **options: Any) -> pl.Trainer:
    """A quiet Trainer: on one device, or with ``sizes`` (tensor-, data-parallel) on the ranks of the pool."""
    split = partial(lightning_tp.TensorParallelStrategy, vocabulary_parallel=vocabulary_parallel)
    return pl.Trainer(
        strategy="auto" if sizes is None else split(*sizes),
        devices=1 if sizes is None else sizes[0] * sizes[1],
        accelerator="cpu",
        **{
            "precision": "64-true",
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        },
    )


def model(**options: Any) -> Regression:
    pl.seed_everything(0, verbose=False)
    return Regression(**options).double()


def every_stage(sizes: tuple[int, int] | None) -> dict[str, Any]:
    """fit, validate, test, predict and fit again, in one process."""
    batch = BATCH if sizes is None else BATCH // sizes[1]
    module, run = model(), trainer(sizes, num_sanity_val_steps=0)
    loader = DataLoader(data(), batch_size=batch)
    run.fit(module, loader, loader)
    found: dict[str, Any] = {"fit": {name: float(value) for name, value in run.callback_metrics.items()}}
    classes = [type(m) for m in module.modules()]
    found["validate"] = run.validate(module, loader, verbose=False)[0]
    found["test"] = run.test(module, loader, verbose=False)[0]
    predictions = torch.cat(run.predict(module, loader))  # type: ignore[arg-type]
    found["predicted"] = predictions
    again = trainer(sizes, num_sanity_val_steps=0)
    again.fit(module, loader)
    assert [type(m) for m in module.modules()] == classes
    if sizes is not None:
        assert isinstance(module.net.head, ParallelModule)
    found["parameters"] = {name: whole(p) for name, p in module.named_parameters()}
    found["order"] = module.seen
    return found


def test_every_stage_gives_the_numbers_of_one_device(ranks2: RankPool) -> None:
    expected = every_stage(None)
    for found in ranks2.run(every_stage, (2, 1)):
        assert found["order"] == expected["order"]
        assert relative(found["predicted"], expected["predicted"]) < 1e-10
        for stage in ("fit", "validate", "test"):
            assert found[stage] == pytest.approx(expected[stage], rel=1e-10)
        for name, value in expected["parameters"].items():
            assert relative(found["parameters"][name], value, floor=1e-4) < 1e-10


def test_data_parallel_ranks_see_disjoint_samples_and_count_each_once(ranks4: RankPool) -> None:
    expected = every_stage(None)
    found = ranks4.run(every_stage, (2, 2))
    for rank in (0, 2):
        assert found[rank]["order"] == found[rank + 1]["order"]
    assert not set(found[0]["order"]) & set(found[2]["order"])
    assert set(found[0]["order"]) | set(found[2]["order"]) == set(expected["order"])
    for result in found:
        # The mean over batches of two is the mean over batches of four, since all have one size.
        for stage in ("validate", "test"):
            assert {k: v for k, v in result[stage].items() if k in ("mean", "largest", "sum")} == pytest.approx(
                {k: v for k, v in expected[stage].items() if k in ("mean", "largest", "sum")}, rel=1e-9
            )
            assert result[stage]["error"] == pytest.approx(found[0][stage]["error"], rel=1e-12)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clip by norm": ({}, {"gradient_clip_val": 0.05}),
    "clip by value": ({}, {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}),
    "accumulation": ({}, {"accumulate_grad_batches": 2}),
    "sgd with momentum": ({"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}, {}),
    "foreach": ({"optimizer": partial(torch.optim.AdamW, lr=1e-2, eps=1e-6, foreach=True)}, {}),
    "fused": ({"optimizer": partial(torch.optim.AdamW, lr=1e-2, eps=1e-6, fused=True)}, {}),
    "frozen column": ({"frozen": "qkv"}, {}),
    "frozen row": ({"frozen": "down"}, {}),
    "recomputed": ({"recompute": True}, {}),
    "anomalies detected": ({}, {"detect_anomaly": True}),
}


def trained(option: str, sizes: tuple[int, int]) -> TrainingRecord:
    model_options, trainer_options = OPTIONS[option]
    batches = [tuple(t[i : i + BATCH] for t in data().tensors) for i in range(0, SAMPLES, BATCH)]
    return train(partial(Regression, **model_options), batches, "64-true", *sizes, **trainer_options)


@pytest.mark.parametrize("option", list(OPTIONS))
def test_options_of_the_trainer_and_optimizers_give_the_same_numbers(
    ranks2: RankPool, ranks4: RankPool, option: str
) -> None:
    expected = trained(option, (1, 1))
    for pool, sizes in ((ranks2, (2, 1)), (ranks4, (2, 2))):
        for record in pool.run(trained, option, sizes):
            differences = largest_difference(record, expected, floor=1e-4)
            assert max(differences.values()) < 1e-10, (sizes, differences)


def unseeded() -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(1000 + dist.get_rank())
    module = Regression().double()
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
    trainer((2, 1)).fit(module, loader)
    return {name: whole(p) for name, p in module.named_parameters()}, module.seen


def test_ranks_of_an_unseeded_run_agree_on_weights_and_on_the_order_of_samples(ranks2: RankPool) -> None:
    (first, order), (second, other) = ranks2.run(unseeded)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert order == other
    assert len(order) == SAMPLES and order != data().tensors[0][:, 0, 0].tolist()


def named_strategy() -> str:
    run = pl.Trainer(strategy="tensor_parallel", accelerator="cpu", devices=2, logger=False)
    return f"{type(run.strategy).__name__} {run.strategy.layout}"  # type: ignore[attr-defined]


def test_the_strategy_has_a_name(ranks2: RankPool) -> None:
    expected = "TensorParallelStrategy ParallelLayout(data_parallel_size=1, tensor_parallel_size=2)"
    assert ranks2.run(named_strategy) == [expected] * 2


class Masks(nn.Module):
    """Returns the dropout masks inside and behind its region."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.inside = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.up(x), 0.5, self.training)
        self.inside = hidden.detach() == 0
        return F.dropout(self.down(hidden), 0.5, self.training)


def masks() -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    module, x = Stack(Masks()), torch.ones(2, LENGTH, WIDTH)
    plan = lightning_tp.find_plan(module, x, dist.get_world_size())
    assert [region.random for region in plan.regions] == [True]
    lightning_tp.parallelize(module, lightning_tp.ParallelLayout(1, dist.get_world_size()).device_mesh("cpu"), plan)
    grads = []
    block: Any = module.blocks[0]
    for recompute in (False, True):
        torch.manual_seed(4)
        module.zero_grad()
        y = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
        y.square().sum().backward()
        grads.append({name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None})
    return block.inside, y.detach(), grads[0], grads[1]


def test_masks_differ_between_ranks_inside_a_region_and_nowhere_else(ranks2: RankPool) -> None:
    (inside0, y0, plain, recomputed), (inside1, y1, *_) = ranks2.run(masks)
    assert inside0.shape == (2, LENGTH, 32)
    assert not torch.equal(inside0, inside1)
    assert torch.equal(y0, y1)
    assert plain.keys() == recomputed.keys() and all(torch.equal(plain[n], recomputed[n]) for n in plain)


def outside() -> None:
    module = LlamaModule(vocab_size=16, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, tie_embeddings=True)
    plan = lightning_tp.find_plan(module, torch.randint(16, (2, 8)), 2)
    lightning_tp.parallelize(module, lightning_tp.ParallelLayout(1, 2).device_mesh("cpu"), plan)
    attention: Any = module.blocks[0].attention
    assert attention.num_heads == 4 and attention.q_proj.out_features == 32
    assert attention.q_proj.weight.shape == (32, 32) and attention.q_proj.weight.to_local().shape == (16, 32)
    assert module.head.weight is module.embedding.weight
    tokens = torch.randint(16, (2, 8))
    twin = copy.deepcopy(module)
    assert torch.equal(twin(tokens), module(tokens))
    assert twin.head.weight is twin.embedding.weight is not module.head.weight
    assert lightning_tp.parallelize(module, lightning_tp.ParallelLayout(1, 2).device_mesh("cpu"), plan) is module


def test_outside_of_a_step_the_model_shows_its_global_sizes(ranks2: RankPool) -> None:
    ranks2.run(outside)


WORDS = 19
"""Divisible by no number of ranks."""
MODELS: dict[str, Any] = {
    "llama": partial(
        LlamaModule, vocab_size=WORDS, tie_embeddings=True, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2
    ),
    "gpt": partial(GPTModule, vocab_size=WORDS, hidden_size=32, num_layers=1, num_heads=4, dropout=0.0, block_size=8),
}


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")))


def fit_from(
    name: str, sizes: tuple[int, int] | None, folder: str, start: str | None, steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    pl.seed_everything(0, verbose=False)
    tokens = torch.randint(WORDS, (8 * 4, 9), generator=torch.Generator().manual_seed(3))
    ways, part = (1, 0) if sizes is None else (sizes[1], dist.get_rank() // sizes[0])
    batches = [(b[:, :-1].chunk(ways)[part], b[:, 1:].chunk(ways)[part]) for b in tokens.split(4)]
    losses = Losses()
    saving = ModelCheckpoint(folder, filename="last", save_top_k=-1, every_n_train_steps=1)
    run = trainer(
        sizes,
        vocabulary_parallel=True,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[losses, saving],
        enable_checkpointing=True,
        use_distributed_sampler=False,
    )
    module = MODELS[name](optimizer=partial(torch.optim.AdamW, lr=1e-2, eps=1e-6), warmup_steps=1).double()
    run.fit(module, DataLoader(batches, batch_size=None), ckpt_path=start)
    return losses.losses, {key: whole(value) for key, value in module.state_dict().items()}


@pytest.mark.parametrize("name", ["llama", "gpt"])
@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (2, 2)])
def test_checkpoints_go_from_any_layout_to_one_device_and_back(
    ranks2: RankPool, ranks4: RankPool, tmp_path: Path, name: str, sizes: tuple[int, int]
) -> None:
    pool = ranks2 if sizes == (2, 1) else ranks4
    losses, _ = fit_from(name, None, str(tmp_path / "one"), None, 8)
    found = pool.run(fit_from, name, sizes, str(tmp_path / "split"), None, 8)
    (saved,) = (tmp_path / "split").glob("last.ckpt")
    plain = torch.load(saved, weights_only=False)
    (reference,) = (tmp_path / "one").glob("last.ckpt")
    expected = torch.load(reference, weights_only=False)
    assert plain["state_dict"].keys() == expected["state_dict"].keys()
    for key, value in expected["state_dict"].items():
        assert type(plain["state_dict"][key]) is Tensor
        assert relative(plain["state_dict"][key], value, floor=1e-4) < 1e-9
    for index, entries in expected["optimizer_states"][0]["state"].items():
        for key, value in entries.items():
            assert relative(plain["optimizer_states"][0]["state"][index][key], value, floor=1e-6) < 1e-8
    assert found[0][0] == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    ranks2: RankPool, ranks4: RankPool, tmp_path: Path, name: str
) -> None:
    fit_from(name, None, str(tmp_path / "one"), None, 8)
    start = str(tmp_path / "one" / "last.ckpt")
    losses, end = fit_from(name, None, str(tmp_path / "more"), start, 16)
    assert len(losses) == 8
    for pool, sizes in ((ranks2, (2, 1)), (ranks4, (2, 2))):
        for resumed, state in pool.run(fit_from, name, sizes, str(tmp_path / str(sizes)), start, 16):
            assert resumed == pytest.approx(losses, rel=1e-9)
            assert all(relative(state[key], end[key], floor=1e-4) < 1e-8 for key in end)
