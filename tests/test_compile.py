"""Compiled models compute what the unsplit model computes: one graph, compiled once."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lightning_tp
from lightning_tp.layout import ParallelLayout
from lightning_tp.testing import RankPool, TrainingRecord, largest_difference, relative, train, whole
from recipes.gpt import GPTModule
from recipes.llama import LlamaModule
from tests.models import MODELS as SMALL
from tests.test_plan import inputs

VOCAB, BATCH, SEQUENCE, STEPS = 64, 4, 12, 3
MODELS: dict[str, Any] = {
    "llama": partial(LlamaModule, VOCAB, 32, num_layers=1, num_heads=8, num_kv_heads=4),
    "gpt": partial(GPTModule, VOCAB, 32, num_layers=1, num_heads=4, dropout=0.0, block_size=SEQUENCE),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().double()


def tokens() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def parallelized(model: nn.Module, example: Tensor) -> Any:
    size = dist.get_world_size()
    plan = lightning_tp.find_plan(model, example, size)
    return lightning_tp.parallelize(model, ParallelLayout(1, size).device_mesh("cpu"), plan)


class Compiled:
    """A graph break, and a compilation after the first step, are errors inside; nothing compiled is left behind."""

    def __enter__(self) -> Compiled:
        torch._dynamo.reset()
        counters.clear()
        return self

    def first_step_done(self) -> None:
        torch._dynamo.config.error_on_recompile = True
        assert not counters["graph_break"], dict(counters["graph_break"])
        assert counters["stats"]["unique_graphs"] >= 1

    def __exit__(self, *error: object) -> None:
        torch._dynamo.config.error_on_recompile = False
        torch._dynamo.reset()


def trained(model: nn.Module, run: Any, first_step_done: Any = lambda: None) -> dict[str, Tensor]:
    """Losses, gradients and parameters of some steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    x, y = tokens()
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(run(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        found[f"{step} loss"] = loss.detach()
        found |= {f"{step} {name}": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        if step == 0:
            first_step_done()
    return found | {name: whole(p) for name, p in model.named_parameters()}


def trained_on_ranks(name: str, what: str) -> dict[str, Tensor]:
    model = parallelized(build(name), tokens()[0])
    with Compiled() as compiled:
        run = model
        if what == "model":
            run = torch.compile(model, backend="aot_eager", fullgraph=True)
        else:
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        return trained(model, run, compiled.first_step_done)


@pytest.mark.parametrize(
    ("name", "what", "size"),
    [("llama", "model", 2), ("gpt", "model", 2), ("llama", "blocks", 2), ("gpt", "blocks", 4), ("llama", "model", 4)],
)
def test_a_compiled_model_trains_as_on_one_device(
    ranks2: RankPool, ranks4: RankPool, name: str, what: str, size: int
) -> None:
    model = build(name)
    expected = trained(model, model)
    for found in (ranks2 if size == 2 else ranks4).run(trained_on_ranks, name, what, timeout=300.0):
        assert found.keys() == expected.keys()
        assert max(relative(found[key], expected[key]) for key in expected) < 1e-10


class CompiledOnce(pl.Callback):
    """Compiling after the first step is an error."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch._dynamo.reset()
        counters.clear()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        assert counters["stats"]["unique_graphs"] >= 1
        torch._dynamo.config.error_on_recompile = True

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        torch._dynamo.config.error_on_recompile = False
        torch._dynamo.reset()


class CompilesItself(GPTModule):
    """A LightningModule that compiles its forward when it is configured: before it is split."""

    def configure_model(self) -> None:
        if self._compiled_call_impl is None:
            self.compile(backend="aot_eager")


def with_optimizer(name: str) -> Any:
    optimizer = partial(torch.optim.AdamW, lr=1e-3, eps=1e-5)
    if name == "compiles itself":
        return CompilesItself(VOCAB, 32, 1, 4, SEQUENCE, dropout=0.0, optimizer=optimizer, warmup_steps=1)
    return MODELS[name](optimizer=optimizer, warmup_steps=1)


def batches() -> list[tuple[Tensor, Tensor]]:
    return [tokens()] * STEPS


def trained_by_trainer(name: str, tensor_parallel_size: int, data_parallel_size: int) -> TrainingRecord:
    torch._dynamo.reset()
    options = False if name == "compiles itself" else {"backend": "aot_eager", "fullgraph": True}
    return train(
        partial(with_optimizer, name),
        batches(),
        "64-true",
        tensor_parallel_size,
        data_parallel_size,
        (CompiledOnce(),),
        compile=options,
    )


@pytest.mark.parametrize(("name", "sizes"), [("llama", (2, 1)), ("gpt", (2, 2)), ("compiles itself", (2, 1))])
def test_a_compiled_model_trains_under_the_trainer_as_on_one_device(
    ranks2: RankPool, ranks4: RankPool, name: str, sizes: tuple[int, int]
) -> None:
    expected = train(partial(with_optimizer, "gpt" if name == "compiles itself" else name), batches(), "64-true")
    for record in (ranks2 if sizes[1] == 1 else ranks4).run(trained_by_trainer, name, *sizes, timeout=300.0):
        differences = largest_difference(record, expected)
        assert max(differences.values()) < 1e-10, differences
        assert record.plan is not None and record.plan.regions


KINDS = [
    "qkv slice",
    "q and k norms over heads",
    "q and k norms over all features",
    "bias for each head",
    "attention and feed-forward in one forward",
    "two rows",
    "called twice",
    "weights used by hand",
    "torch transformer",
]


def small(name: str) -> nn.Module:
    torch.manual_seed(0)
    return SMALL[name][0]().double()


def gradients(model: nn.Module, run: Any) -> dict[str, Tensor]:
    y = run(inputs())
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return {"output": y.detach()} | {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def small_on_ranks(name: str) -> dict[str, Tensor]:
    model = parallelized(small(name), inputs())
    with Compiled() as compiled:
        found = gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True))
        compiled.first_step_done()
        return found


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_region_is_one_graph(ranks2: RankPool, name: str) -> None:
    model = small(name)
    expected = gradients(model, model)
    for found in ranks2.run(small_on_ranks, name, timeout=300.0):
        assert found.keys() == expected.keys()
        # The gradient of a key's bias is zero but for rounding.
        assert max(relative(found[key], expected[key], floor=1e-4) for key in expected) < 1e-10


class Broken(nn.Module):
    """A graph break between columns and rows, where sizes are rescaled."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(16, dim=2)
        torch._dynamo.graph_break()
        q, k, v = (t.view(*x.shape[:2], 4, 4).transpose(1, 2) for t in (q, k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


def broken_on_ranks() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = parallelized(nn.Sequential(nn.LayerNorm(16), Broken(), nn.LayerNorm(16)).double(), inputs())
    assert model._parallel.plan.regions[0].sizes
    return gradients(model, torch.compile(model, backend="eager"))


def test_a_graph_break_of_the_user_in_a_region_changes_no_number(ranks2: RankPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), Broken(), nn.LayerNorm(16)).double()
    expected = gradients(model, model)
    for found in ranks2.run(broken_on_ranks, timeout=300.0):
        assert max(relative(found[key], expected[key]) for key in expected) < 1e-10
