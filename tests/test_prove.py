"""A plan with a mistake in it is not proven, whichever mistake; and one that was found is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lightning_tp
from benchmarks.zoo import ARCHITECTURES
from lightning_tp import PlanError, ShardingPlan
from lightning_tp.plan.sharding_plan import Region
from tests.models import LENGTH, MODELS, WIDTH


def example(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if name in ARCHITECTURES:
        return ARCHITECTURES[name].build(), ARCHITECTURES[name].batch()
    return MODELS[name][0](), torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5))


def exchanged(rows: Any) -> Any:
    return rows[::-1]


def first_column_exchanged(region: Region) -> Region:
    first, *others = region.columns
    return replace(region, columns=(replace(first, rows=exchanged(first.rows)), *others))


def half_of_a_column_exchanged(region: Region) -> Region:
    """The first range of rows goes to the other rank: the halves of a fused weight no longer belong together."""
    first, *others = region.columns
    (a, *rest_a), (b, *rest_b) = first.rows
    return replace(region, columns=(replace(first, rows=((b, *rest_a), (a, *rest_b))), *others))


def first_shard_exchanged(region: Region) -> Region:
    first, *others = region.shards
    return replace(region, shards=(replace(first, rows=exchanged(first.rows)), *others))


def attribute_of_all_heads(region: Region) -> Region:
    return replace(region, attributes=tuple(replace(change, value=2 * change.value) for change in region.attributes))


def argument_exchanged(region: Region) -> Region:
    return replace(region, arguments=tuple(replace(cut, rows=exchanged(cut.rows)) for cut in region.arguments))


def no_bias_rule(region: Region) -> Region:
    assert region.boundary is not None and region.boundary.once
    return replace(region, boundary=replace(region.boundary, once=()))


MUTATIONS: list[tuple[str, str, Callable[[Region], Region]]] = [
    ("attention and feed-forward in one forward", "columns", first_column_exchanged),
    ("fused gate", "columns", half_of_a_column_exchanged),
    ("interleaved gate", "columns", first_column_exchanged),
    ("llama", "columns", first_column_exchanged),
    ("attention and feed-forward in one forward", "attributes", attribute_of_all_heads),
    ("attention and feed-forward in one forward", "attributes", lambda region: replace(region, attributes=())),
    ("qkv split", "sizes", lambda region: replace(region, sizes=())),
    ("bias for each head", "shards", first_shard_exchanged),
    ("whole parameter inside", "partial", lambda region: replace(region, partial=())),
    ("scalar parameter inside", "partial", lambda region: replace(region, partial=())),
    ("q and k norms over all features", "norms", lambda region: replace(region, norms=())),
    ("q and k norms over all features", "norms", lambda region: replace(region, norms=region.norms[:1])),
    ("weights used by hand", "boundary", first_shard_exchanged),
    ("torch transformer", "boundary", no_bias_rule),
    ("gpt_oss", "boundary", no_bias_rule),
    ("bloom", "arguments", argument_exchanged),
    ("bloom", "arguments", lambda region: replace(region, arguments=())),
    ("deepseek_v3", "entries", lambda region: replace(region, entries=())),
    ("two rows", "columns", lambda region: replace(region, inputs=((*region.inputs[0], "blocks.0.a"),))),
    ("llama", "columns", lambda region: replace(region, random=not region.random)),
]


@pytest.mark.parametrize(("name", "field", "mutate"), MUTATIONS)
def test_a_plan_with_a_mistake_is_not_proven(name: str, field: str, mutate: Callable[[Region], Region]) -> None:
    model, inputs = example(name)
    plan = lightning_tp.find_plan(model, inputs, 2, unsplittable="replicate")
    lightning_tp.prove_plan(model, inputs, plan)
    place = next(i for i, region in enumerate(plan.regions) if getattr(region, field))
    changed = mutate(plan.regions[place])
    assert changed != plan.regions[place]
    mutated = replace(plan, regions=(*plan.regions[:place], changed, *plan.regions[place + 1 :]))
    with pytest.raises(PlanError, match="The plan is not proven"):
        lightning_tp.prove_plan(model, inputs, mutated)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["t5", "mamba", "olmo2", "falcon multi-query"])
def test_what_was_found_is_proven_again_from_its_file(name: str, size: int, tmp_path: Any) -> None:
    model, inputs = example(name)
    plan = lightning_tp.find_plan(model, inputs, size, unsplittable="replicate")
    assert plan.regions
    plan.save(tmp_path / "plan.yaml")
    loaded = ShardingPlan.load(tmp_path / "plan.yaml")
    assert loaded == plan
    lightning_tp.prove_plan(model, inputs, loaded)


def test_a_plan_for_another_model_is_refused() -> None:
    model, inputs = example("llama")
    plan = lightning_tp.find_plan(model, inputs, 2)
    other, other_inputs = example("fused gate")
    with pytest.raises(PlanError, match="made for another model"):
        lightning_tp.prove_plan(other, other_inputs, plan)


class Logs(nn.Module):
    """Features that are split, and of which a number is taken."""

    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.up, self.down, self.logs, self.seen = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), logs, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).relu()
        if self.logs:
            self.seen = hidden.mean().item()
        return self.down(hidden)


def test_a_plan_for_code_that_did_not_log_what_it_splits() -> None:
    x = torch.randn(2, LENGTH, WIDTH)
    plan = lightning_tp.find_plan(Logs(False), x, 2)
    lightning_tp.prove_plan(Logs(False), x, plan)
    with pytest.raises(PlanError, match=r"output of its column up is returned, logged, or decides something"):
        lightning_tp.prove_plan(Logs(True), x, plan)
