"""A plan that was found is taken from the cache while the model computes the same, and proven again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_tp
from lightning_tp import ShardingPlan
from lightning_tp.plan import cache, find
from tests.models import LENGTH, WIDTH, FeedForward, SelfAttention, Stack


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_TP_CACHE", str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each plan that was searched for."""
    found: list[int] = []
    probe = find.probe

    def counted(*arguments: Any) -> Any:
        found.append(1)
        return probe(*arguments)

    monkeypatch.setattr(find, "probe", counted)
    return found


def model(heads: int = 4, hidden: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return Stack(SelfAttention("slice", heads=heads), FeedForward(hidden=hidden))


def planned(module: nn.Module, size: int = 2, batch: int = 2, **options: Any) -> ShardingPlan:
    x = torch.ones(batch, LENGTH, WIDTH).cumsum(-1)
    return lightning_tp.find_plan(module, x, size, cache=True, **options)


def test_the_same_model_is_searched_once(searches: list[int], folder: Path) -> None:
    first = planned(model())
    assert planned(model()) == first
    assert len(searches) == 1
    assert len(list(folder.glob("*.yaml"))) == 1


def test_what_changes_the_plan_is_another_plan(searches: list[int]) -> None:
    planned(model())
    planned(model(), size=4)
    planned(model(heads=2))
    planned(model(hidden=64))
    planned(model(), batch=3)
    planned(model(), vocabulary_parallel=False)
    planned(model(), styles={"*.up": "column", "*.down": "row"})
    planned(Stack(SelfAttention("slice"), FeedForward("relu")))
    assert len(searches) == 8


def test_without_the_option_nothing_is_kept(searches: list[int], folder: Path) -> None:
    x = torch.randn(2, LENGTH, WIDTH)
    lightning_tp.find_plan(model(), x, 2)
    lightning_tp.find_plan(model(), x, 2)
    assert len(searches) == 2
    assert not folder.exists()


def test_a_damaged_or_wrong_file_is_not_believed(searches: list[int], folder: Path) -> None:
    plan = planned(model())
    (path,) = folder.glob("*.yaml")
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    assert planned(model()) == plan
    # A plan that fits and is wrong: the code is not changed for one rank's share.
    data = plan.to_dict()
    changed = [region for region in data["regions"] if region["attributes"] or region["sizes"]]
    assert changed
    for region in changed:
        region["attributes"], region["sizes"] = [], []
    ShardingPlan.from_dict(data).save(path)
    assert planned(model()) == plan
    # One for another model, which is searched for too.
    lightning_tp.find_plan(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(2, 4), 2).save(path)
    assert planned(model()) == plan
    assert len(searches) == 5


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path, searches: list[int]) -> None:
    folder.write_text("not a folder")
    planned(model())
    planned(model())
    assert len(searches) == 2


def test_old_plans_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST_PLANS", 2)
    for hidden in (8, 16, 24):
        planned(model(hidden=hidden))
    assert len(list(folder.glob("*.yaml"))) == 2


def test_another_process_finds_it(folder: Path, searches: list[int]) -> None:
    code = "from tests.test_cache import model, planned; planned(model())"
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)
    assert len(list(folder.glob("*.yaml"))) == 1
    planned(model())
    assert not searches


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LIGHTNING_TP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "lightning_tp" / "plans"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache" / "lightning_tp" / "plans"
