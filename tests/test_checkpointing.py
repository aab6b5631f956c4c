"""Recomputed activations give the same numbers, dropout included, and repeat no more collectives than they must."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lightning_tp
from lightning_tp.layout import ParallelLayout
from lightning_tp.testing import RankPool, relative, whole
from recipes.gpt import GPTModule
from tests.test_same_numbers import Collectives

VOCAB, BATCH, SEQUENCE, LAYERS, STEPS = 32, 2, 6, 2, 3
MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def keep_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


selective = functools.partial(create_selective_checkpoint_contexts, keep_matmuls)
KINDS: dict[str, dict[str, Any]] = {
    "block": {},
    "reentrant": {"use_reentrant": True},
    "selective": {"context_fn": selective},
    "kept": {"context_fn": lightning_tp.keep_reduced_outputs},
    "selective, kept": {"context_fn": functools.partial(lightning_tp.keep_reduced_outputs, selective)},
    "whole": {},
    "whole, kept": {"context_fn": lightning_tp.keep_reduced_outputs},
}


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.options = inner, {"use_reentrant": False, **options}

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, **self.options)  # type: ignore[return-value]


class Trunk(nn.Module):
    """The blocks as one module."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(dropout: float) -> Any:
    torch.manual_seed(0)
    return GPTModule(VOCAB, 16, LAYERS, 4, SEQUENCE, dropout).double()


def trained(kind: str, dropout: float) -> tuple[dict[str, Tensor], int, int]:
    """Losses, gradients and parameters of some steps; the all-reduces of the last forward and backward."""
    model = build(dropout)
    tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size > 1:
        plan = lightning_tp.find_plan(model, x, size)
        lightning_tp.parallelize(model, ParallelLayout(1, size).device_mesh("cpu"), plan)
    names = {id(p): name for name, p in model.named_parameters()}
    if kind.startswith("whole"):
        model.blocks = nn.ModuleList([Checkpointed(Trunk(model.blocks), KINDS[kind])])
    elif kind:
        model.blocks = nn.ModuleList(Checkpointed(block, KINDS[kind]) for block in model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    torch.manual_seed(2)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        with Collectives() as forward:
            loss = F.cross_entropy(model(x).flatten(0, 1), y)
        with Collectives() as backward:
            loss.backward()
        optimizer.step()
        found[f"{step} loss"] = loss.detach()
        found |= {f"{step} {names[id(p)]}": whole(p.grad) for p in model.parameters() if p.grad is not None}
    found |= {names[id(p)]: whole(p) for p in model.parameters()}
    return found, len(forward.calls), len(backward.calls)


def trained_on_ranks(dropout: float) -> dict[str, tuple[dict[str, Tensor], int, int]]:
    return {kind: trained(kind, dropout) for kind in ("", *KINDS)}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputation_changes_no_number_and_repeats_few_collectives(ranks2: RankPool, dropout: float) -> None:
    one_device = trained("", 0.0)[0]
    # Without dropout nothing behind a block's last reduction is saved: recomputation stops before it.
    repeated = LAYERS if dropout == 0.0 else 2 * LAYERS
    expected = {
        "": 2 * LAYERS,
        "block": 2 * LAYERS + repeated,
        "reentrant": 4 * LAYERS,
        "selective": 2 * LAYERS + repeated,
        "kept": 2 * LAYERS,
        "selective, kept": 2 * LAYERS,
        "whole": 4 * LAYERS if dropout else 4 * LAYERS - 1,
        "whole, kept": 2 * LAYERS,
    }
    for found in ranks2.run(trained_on_ranks, dropout):
        plain = found[""][0]
        assert dropout or max(relative(plain[key], one_device[key], 1e-6) for key in one_device) < 1e-10
        for kind, (numbers, forward, backward) in found.items():
            assert numbers.keys() == plain.keys()
            assert max(relative(numbers[key], plain[key], 1e-6) for key in plain) < 1e-12, kind
            assert forward == 2 * LAYERS, kind
            assert backward == expected[kind], kind


def changed_in_place() -> tuple[Tensor, Tensor]:
    """Gradients where code changes a reduced output in place, without and with what is kept."""
    model = build(0.0)
    x = torch.randint(VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    size = dist.get_world_size()
    plan = lightning_tp.find_plan(model, x, size)
    for block in model.blocks:
        block.attn.c_proj.bias = None  # its output is what was reduced
    lightning_tp.parallelize(model, ParallelLayout(1, size).device_mesh("cpu"), plan)
    for block in model.blocks:
        block.attn.c_proj.register_forward_hook(lambda module, args, y: y.mul_(2.0))
    grads = []
    blocks = list(model.blocks)
    for kind in ("block", "kept"):
        model.blocks = nn.ModuleList(Checkpointed(block, KINDS[kind]) for block in blocks)
        model.zero_grad()
        model(x).square().sum().backward()
        grads.append(whole(blocks[0].attn.c_attn.weight.grad))
    return grads[0], grads[1]


def test_a_reduced_output_that_code_changes_is_reduced_again(ranks2: RankPool) -> None:
    for plain, kept in ranks2.run(changed_in_place):
        assert relative(kept, plain) < 1e-12


def transformers_on_ranks(kept: bool) -> tuple[dict[str, Tensor], int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    tokens = torch.randint(VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size > 1:
        plan = lightning_tp.find_plan(model, {"input_ids": tokens, "labels": tokens}, size, vocabulary_parallel=False)
        lightning_tp.parallelize(model, ParallelLayout(1, size).device_mesh("cpu"), plan)
        options = {"context_fn": lightning_tp.keep_reduced_outputs} if kept else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **options})
    model.train()
    loss = model(input_ids=tokens, labels=tokens).loss
    with Collectives() as backward:
        loss.backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}, len(backward.calls)


@pytest.mark.parametrize("kept", [False, True])
def test_gradient_checkpointing_of_transformers(ranks2: RankPool, kept: bool) -> None:
    pytest.importorskip("transformers")
    expected, _ = transformers_on_ranks(kept)
    for found, calls in ranks2.run(transformers_on_ranks, kept):
        assert max(relative(found[key], expected[key]) for key in expected) < 1e-10
        assert calls == 2 * LAYERS + (0 if kept else LAYERS)
