"""One architecture of the zoo for each mechanism of the plan: the same numbers, and enough is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo import ARCHITECTURES
from benchmarks.zoo.architecture import Architecture, features_batch
from benchmarks.zoo.float64 import KeepFloat64
from benchmarks.zoo.report import figures, markdown
from benchmarks.zoo.run import Row, compare, first_line, quiet, run
from benchmarks.zoo.shares import block_share, block_weights
from lightning_tp import find_plan
from lightning_tp.testing import RankPool

FAST = [name for name, architecture in ARCHITECTURES.items() if architecture.fast]
MINIMUM_SHARE = {"mixtral": 0.997, "deepseek_v3": 0.93, "gpt_oss": 0.994, "swin": 0.93, "DiT": 0.66}
"""Least share of the weights in repeated blocks that is split at two ranks, where it is not all of them."""


@pytest.mark.parametrize("name", FAST)
def test_same_numbers_and_enough_is_split(name: str, ranks2: RankPool) -> None:
    ranks2.run(quiet)
    comparison = compare(ARCHITECTURES[name], 2, ranks2)
    model = nn.ModuleDict({"module": ARCHITECTURES[name].build()})  # by the names of the plan
    assert block_share(model, comparison.plan) >= MINIMUM_SHARE.get(name, 1.0)


def test_there_are_sixty_architectures_and_one_fast_one_for_each_mechanism() -> None:
    assert len(ARCHITECTURES) >= 60
    assert sorted(ARCHITECTURES[name].mechanism for name in FAST) == sorted(
        {architecture.mechanism for architecture in ARCHITECTURES.values()}
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 8), nn.Linear(8, 64), nn.LayerNorm((1, 64))
        self.table, self.scale = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))
        self.depthwise, self.places = nn.Conv1d(64, 64, 1), nn.Embedding(5, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x.unsqueeze(-2)).squeeze(-2))))


class Model(nn.Module):
    """Two blocks, and around them what belongs to no block: an embedding layer and a head of several linears."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(64, 64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(64)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_the_share_counts_the_weights_of_repeated_blocks() -> None:
    model = Model()
    assert block_weights(model) == {
        f"blocks.{layer}.{name}": size
        for layer in (0, 1)
        for name, size in (("table", 12), ("up.weight", 512), ("down.weight", 512))
    }
    plan = find_plan(model, features_batch(), 2)
    assert block_share(model, plan) == pytest.approx(1024 / 1036)


def test_a_model_without_blocks_has_no_share() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 64))
    plan = find_plan(model, torch.randn(2, 64), 2)
    with pytest.raises(ValueError, match="Sequential has no repeated block"):
        block_share(model, plan)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("first line\nsecond line")


def test_a_failure_is_a_row_of_the_table(ranks2: RankPool) -> None:
    row = Row(Architecture("broken", Broken, features_batch, "always fails"))
    row.outcomes[2] = run(row.architecture, 2, ranks2)
    assert row.failed
    text = markdown([row], (2,))
    assert "FAILED: broken." in text
    assert "| broken | always fails | - | - | - | FAILED: ParallelConfigError" in text
    assert "RuntimeError: first line" in text and "second line" not in text
    assert "first line" in figures([row])[0]["sizes"]["2"]["failure"]


class WrongOnRanks(Model):
    """Its second rank computes something else, by a part in a hundred million."""

    def forward(self, x: Tensor) -> Tensor:
        on_second = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        return super().forward(x * (1 + 1e-8) if on_second else x)


def test_a_small_difference_fails(ranks2: RankPool) -> None:
    with pytest.raises(AssertionError, match="gives other numbers than one device, beyond 1e-09"):
        compare(Architecture("wrong", WrongOnRanks, features_batch), 2, ranks2)


@pytest.mark.parametrize(
    "rounded",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: torch.softmax(x, -1, dtype=torch.float32),
        lambda x: nn.functional.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: x.sum(-1, dtype=torch.float32),
    ],
)
def test_float64_is_kept(rounded: Any) -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    assert rounded(x).dtype == torch.float32
    with KeepFloat64():
        assert rounded(x).dtype == torch.float64
        assert x.long().dtype == torch.int64


def test_a_failure_in_one_line() -> None:
    error = AssertionError("Other numbers:\n  loss of step 1: 2e-3\n  gradient a: 1e-3")
    assert first_line(error) == "Other numbers: loss of step 1: 2e-3"
    rank = RuntimeError("run failed.\nrank 0: Traceback:\n  File 'a'\nValueError: no\nrank 1: ...\nKeyError: b")
    assert first_line(rank) == "ValueError: no"
