"""Plans of models that no machine could hold: parameters on the meta device, repeated blocks looked at once."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import lightning_tp
from lightning_tp import ParallelConfigError, ShardingPlan
from lightning_tp.plan import localize as localizing
from tests.models import WIDTH, FeedForward, SelfAttention, Stack

LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=128, use_cache=False,
)  # fmt: skip
GPT2 = GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=128, n_positions=64, use_cache=False)
HUGE = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=4, num_attention_heads=64, num_key_value_heads=8,
    vocab_size=128256, use_cache=False,
)  # fmt: skip


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(4, 100, (2, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def without_errors(plan: ShardingPlan) -> ShardingPlan:
    return dataclasses.replace(plan, regions=tuple(dataclasses.replace(r, error=0.0) for r in plan.regions))


@pytest.mark.parametrize(("kind", "config"), [(LlamaForCausalLM, LLAMA), (GPT2LMHeadModel, GPT2)])
def test_the_plan_without_values_is_the_plan_with_them(kind: type[PreTrainedModel], config: LlamaConfig) -> None:
    plan = lightning_tp.find_plan(kind._from_config(config), tokens(), 2)
    with lightning_tp.parameters_on_meta():
        empty = kind._from_config(config)
    assert without_errors(lightning_tp.find_plan(empty, tokens(), 2)) == without_errors(plan)
    assert all(parameter.is_meta for parameter in empty.parameters())
    with torch.device("meta"):  # buffers have no values either
        emptier = kind._from_config(config)
    assert without_errors(lightning_tp.find_plan(emptier, tokens(), 2)) == without_errors(plan)
    lightning_tp.prove_plan(empty, tokens(), plan)


def test_only_parameters_are_made_on_meta_and_only_inside() -> None:
    with lightning_tp.parameters_on_meta():
        norm, tied = nn.BatchNorm1d(4), nn.Linear(4, 4)
        frozen = nn.Linear(4, 4).requires_grad_(False)
        tied.again = tied.weight
    assert norm.weight.is_meta and not norm.running_mean.is_meta
    assert tied.again is tied.weight and tied.weight.is_meta
    assert not frozen.weight.requires_grad
    assert not nn.Linear(4, 4).weight.is_meta


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = FeedForward()
        self.register_buffer("order", torch.arange(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x[:, self.order])


def test_numbers_that_code_needs_are_not_guessed() -> None:
    with torch.device("meta"):
        model = Positions()
    with pytest.raises(ParallelConfigError, match=r"buffer order .* int64 .*parameters_on_meta"):
        lightning_tp.find_plan(model, torch.randn(2, 8, WIDTH), 2)
    with lightning_tp.parameters_on_meta():
        model = Positions()
    assert lightning_tp.find_plan(model, torch.randn(2, 8, WIDTH), 2).split_share > 0.9


def test_a_large_model_needs_no_memory_for_its_weights() -> None:
    with lightning_tp.parameters_on_meta():
        model = LlamaForCausalLM._from_config(HUGE)
    plan = lightning_tp.find_plan(model, tokens(), 8)
    assert len(plan.regions) == 10
    assert plan.split_share == 1.0  # with the output head
    split = plan.regions[1].columns
    assert [len(column.row_indices(0)) for column in split] == [1024, 128, 128]
    assert max(region.error for region in plan.regions) < 1e-12


class Unequal(nn.Module):
    """Blocks of one class of which one computes something else than its parameters and attributes show."""

    def __init__(self, scales: list[float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(scale) for scale in scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).relu()
        if self.scale > 1:
            hidden = hidden / hidden.sum(-1, keepdim=True).abs()
        return self.down(hidden)


def test_repeated_blocks_are_proven_once_and_others_are_not_taken_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs: list[str] = []
    proof = localizing.RegionProof

    class Counted(proof):  # type: ignore[misc, valid-type]
        def __init__(self, model: nn.Module, found: object, candidate: object, *rest: object) -> None:
            proofs.append(candidate.call.name)  # type: ignore[attr-defined]
            super().__init__(model, found, candidate, *rest)

    monkeypatch.setattr(localizing, "RegionProof", Counted)
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    plan = lightning_tp.find_plan(Unequal([1.0, 1.0, 2.0, 1.0]), x, 2)
    assert [region.module for region in plan.regions] == ["blocks.0", "blocks.1", "blocks.3"]
    assert proofs == ["blocks.0"]
    proofs.clear()
    blocks = [SelfAttention(heads=4), FeedForward(), SelfAttention(heads=4), FeedForward(), SelfAttention(heads=2)]
    plan = lightning_tp.find_plan(Stack(*blocks), x, 2)
    assert len(plan.regions) == 5
    assert len(proofs) == 3
