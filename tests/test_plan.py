"""What is split, and that the numbers of many kinds of models stay those of the unsplit model."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_tp
from lightning_tp import ParallelConfigError, PlanError, ShardingPlan
from lightning_tp.layout import ParallelLayout
from lightning_tp.testing import RankPool, relative, whole
from recipes.llama import LlamaModule
from tests.models import (
    LENGTH,
    MODELS,
    WIDTH,
    FeedForward,
    PartlyReadBefore,
    ReturnsItsHidden,
    SelfAttention,
    Stack,
)


def inputs() -> torch.Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def numbers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Outputs, input gradient, parameter gradients and buffers after two steps of SGD."""
    found: dict[str, torch.Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = inputs().requires_grad_(True)
        optimizer.zero_grad()
        y = model(x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        assert x.grad is not None
        found |= {f"{step} output": y.detach(), f"{step} input": x.grad}
        found |= {f"{step} {n}": whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return found | {f"buffer {n}": b.detach().clone() for n, b in model.named_buffers()}


def numbers_on_ranks(name: str) -> tuple[set[str], dict[str, torch.Tensor]]:
    model = build(name)
    size = dist.get_world_size()
    plan = lightning_tp.find_plan(model, inputs(), size, unsplittable="replicate")
    lightning_tp.parallelize(model, ParallelLayout(1, size).device_mesh("cpu"), plan)
    split = {name for region in plan.regions for name in (*region.split_names, *region.rows)}
    return split, numbers(model)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", list(MODELS))
def test_numbers_are_those_of_the_unsplit_model(ranks2: RankPool, ranks4: RankPool, name: str, size: int) -> None:
    expected = numbers(build(name))
    for split, found in (ranks2 if size == 2 else ranks4).run(numbers_on_ranks, name):
        assert found.keys() == expected.keys()
        differences = {key: relative(found[key], expected[key], floor=1e-4) for key in found}
        assert {key: value for key, value in differences.items() if value > 1e-10} == {}
        if size == 2 and MODELS[name][1] is not None:
            assert split == MODELS[name][1]


def test_planning_leaves_the_model_as_it_was() -> None:
    model = build("no gradient and batch norm")
    model.get_parameter("blocks.0.up.weight").requires_grad_(False)
    model.blocks[0].norm.eval()  # type: ignore[index, union-attr]
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    objects = {name: id(p) for name, p in model.named_parameters()}
    torch.manual_seed(3)
    random_state = torch.get_rng_state()
    lightning_tp.find_plan(model, inputs(), 2)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {name: id(p) for name, p in model.named_parameters()} == objects
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.get_parameter("blocks.0.up.weight").requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = lightning_tp.find_plan(build("qkv split"), inputs(), 2)
    plan.save(tmp_path / "plan.yaml")
    assert ShardingPlan.load(tmp_path / "plan.yaml") == plan
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.yaml"]


@pytest.mark.parametrize("text", ["version: 7\n", "- 1\n", "version: 1\nregions: []\n", "a: [\n"])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(PlanError):
        ShardingPlan.load(tmp_path / "plan.yaml")


def test_fused_rows_are_those_of_the_rank_s_heads() -> None:
    (region,) = lightning_tp.find_plan(Stack(SelfAttention("split")).double(), inputs(), 2).regions
    assert [column.rows for column in region.columns] == [(((0, 8), (16, 24), (32, 40)), ((8, 16), (24, 32), (40, 48)))]
    assert region.found_by == "sizes"


def test_a_size_that_does_not_divide_the_heads_names_the_legal_ones() -> None:
    model = Stack(SelfAttention("chunk", heads=4), FeedForward(hidden=24)).double()
    with pytest.raises(ParallelConfigError, match=r"tensor_parallel_size=8 .*Legal sizes: \[1, 2, 4\]"):
        lightning_tp.find_plan(model, inputs(), 8)
    with pytest.raises(ParallelConfigError, match=r"tensor_parallel_size=3 .*Legal sizes: \[1, 2, 4\]"):
        lightning_tp.find_plan(model, inputs(), 3)
    plan = lightning_tp.find_plan(model, inputs(), 3, unsplittable="replicate")
    assert [region.rows for region in plan.regions] == [("blocks.1.down",)]
    reasons = {entry.module: entry.reason for entry in plan.replicated}
    assert reasons["blocks.0.qkv"] == "3 ranks do not fit; legal sizes: 1, 2, 4"


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 3, 2), (6, 2, 4), (6, 2, 3), (6, 3, 4)])
def test_heads_that_ranks_would_cut_are_a_misfit(heads: int, kv_heads: int, size: int) -> None:
    model = LlamaModule(vocab_size=16, hidden_size=96, num_layers=1, num_heads=heads, num_kv_heads=kv_heads)
    with pytest.raises(ParallelConfigError, match=rf"tensor_parallel_size={size} .*Legal sizes"):
        lightning_tp.find_plan(model, torch.randint(16, (2, 8)), size)


def test_a_mapping_splits_only_what_it_names() -> None:
    model = build("qkv split")
    styles = {"*.up": "column", "*.down": "row"}
    plan = lightning_tp.find_plan(model, inputs(), 2, styles=styles)
    assert [region.module for region in plan.regions] == ["blocks.1"]
    for wrong, message in (
        ({"*.gate": "column"}, "matches no linear"),
        ({"*.up": "columns"}, "Unknown style"),
        ({"*.up": "row", "*.down": "column"}, "not found or not proven"),
        ({"head": "column"}, "not found or not proven"),
    ):
        with pytest.raises(PlanError, match=message):
            lightning_tp.find_plan(model, inputs(), 2, styles=wrong)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (torch.zeros(2, 3), "could not be run"),
        (7, "must be a tensor, a tuple"),
        ({"y": torch.zeros(1)}, "could not be run"),
    ],
)
def test_an_input_that_does_not_run_is_refused(example: object, message: str) -> None:
    with pytest.raises(ParallelConfigError, match=message):
        lightning_tp.find_plan(build("relu"), example, 2)


def test_lazy_models_are_refused() -> None:
    with pytest.raises(ParallelConfigError, match="lazy"):
        lightning_tp.find_plan(nn.LazyLinear(4), torch.zeros(2, 3), 2)


def buffers_on_ranks() -> dict[str, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    model = FeedForward()
    for name, value in (
        ("mask", torch.rand(3, 3) > 0.5),
        ("rotary", torch.randn(4, dtype=torch.complex64)),
        ("count", torch.tensor(dist.get_rank())),
        ("transposed", torch.randn(3, 2).t().bfloat16()),
    ):
        model.register_buffer(name, value)
    plan = lightning_tp.find_plan(model, torch.randn(2, WIDTH), dist.get_world_size())
    lightning_tp.parallelize(model, ParallelLayout(1, dist.get_world_size()).device_mesh("cpu"), plan)
    return {name: whole(value) for name, value in model.state_dict().items()}


def test_every_rank_takes_the_values_of_rank_zero(ranks2: RankPool) -> None:
    first, second = ranks2.run(buffers_on_ranks)
    assert first.keys() == second.keys() and len(first) == 8
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert int(first["count"]) == 0


def mixed_on_ranks() -> tuple[torch.dtype, torch.Tensor]:
    torch.manual_seed(0)
    model, x = FeedForward(), inputs().float()
    plan = lightning_tp.find_plan(model, x, dist.get_world_size())
    lightning_tp.parallelize(model, ParallelLayout(1, dist.get_world_size()).device_mesh("cpu"), plan)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    return y.dtype, y.float()


def test_mixed_precision_gives_the_dtype_of_the_unsplit_model(ranks2: RankPool) -> None:
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        expected = FeedForward()(inputs().float())
    for dtype, found in ranks2.run(mixed_on_ranks):
        assert dtype == expected.dtype == torch.bfloat16
        assert relative(found, expected.float()) < 2e-2


def test_features_that_the_model_returns_in_an_object_stay_whole() -> None:
    assert lightning_tp.find_plan(ReturnsItsHidden(), inputs().float(), 2).regions == ()


def test_a_model_that_returns_no_tensor_is_judged_by_what_its_outermost_module_returns() -> None:
    model = FeedForward()
    (region,) = lightning_tp.find_plan(model, lambda: [model(inputs().float()), None][1], 2).regions
    assert region.rows == ("down",)
    with pytest.raises(ParallelConfigError, match="returns no tensor"):
        lightning_tp.find_plan(model, lambda: None, 2)


def test_rows_that_a_relu_hides_in_one_run_are_found_in_another() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4))
    # One row of input: half of the hidden features are zero in any one run.
    (region,) = lightning_tp.find_plan(model, torch.randn(1, 4), 2).regions
    assert [column.rows for column in region.columns] == [(((0, 16),), ((16, 32),))]


def read_before_on_ranks() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Stack(PartlyReadBefore()).double()
    plan = lightning_tp.find_plan(model, inputs(), dist.get_world_size())
    assert [region.inputs for region in plan.regions] == [(("blocks.0.up", "blocks.0.gate"),)]
    lightning_tp.parallelize(model, ParallelLayout(1, dist.get_world_size()).device_mesh("cpu"), plan)
    model.blocks[0].before = True  # type: ignore[assignment]
    return numbers(model)


def test_a_copy_made_without_gradients_is_not_used_with_them(ranks2: RankPool) -> None:
    torch.manual_seed(0)
    expected = numbers(Stack(PartlyReadBefore()).double())
    for found in ranks2.run(read_before_on_ranks):
        assert all(relative(found[key], expected[key], floor=1e-4) < 1e-10 for key in expected)


def forward_of_its_own() -> nn.Module:
    """A module around a region whose forward was replaced on the instance."""
    model = build("qkv split")
    attention: Any = model.get_submodule("blocks.0")
    attention.forward = functools.partial(type(attention).forward, attention)
    return model


def forward_of_its_own_on_ranks() -> dict[str, torch.Tensor]:
    model = forward_of_its_own()
    plan = lightning_tp.find_plan(model, inputs(), 2)
    assert [region.module for region in plan.regions] == ["blocks.0", "blocks.1"]
    lightning_tp.parallelize(model, ParallelLayout(1, 2).device_mesh("cpu"), plan)
    return numbers(model)


def test_a_forward_replaced_on_the_instance_runs_inside_its_region(ranks2: RankPool) -> None:
    expected = numbers(forward_of_its_own())
    for found in ranks2.run(forward_of_its_own_on_ranks):
        assert found.keys() == expected.keys()
        assert max(relative(found[key], expected[key]) for key in expected) < 1e-10
