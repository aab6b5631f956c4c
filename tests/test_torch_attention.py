"""torch's own attention and transformer modules, with every option they have."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_tp
from lightning_tp import ParallelConfigError, PlanError
from lightning_tp.layout import ParallelLayout
from lightning_tp.testing import RankPool, relative

EMBED, HEADS, LENGTH, KEYS, SAMPLES = 16, 4, 5, 7, 3


class Attention(nn.Module):
    """Calls ``nn.MultiheadAttention`` with options given to the module and to the call."""

    def __init__(self, options: dict[str, Any], call: dict[str, Any], masks: tuple[str, ...], batched: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(EMBED, HEADS, **options)
        if self.attention.in_proj_bias is not None:
            nn.init.normal_(self.attention.in_proj_bias)
            nn.init.normal_(self.attention.out_proj.bias)
        self.call, self.masks, self.batched = call, masks, batched

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        generator = torch.Generator().manual_seed(3)
        kwargs = dict(self.call)
        if "causal" in self.masks:
            mask = torch.ones(LENGTH, KEYS, dtype=torch.bool).triu(1)
            kwargs |= {"attn_mask": mask, "is_causal": False}
        if "float" in self.masks:
            kwargs["attn_mask"] = torch.randn(LENGTH, KEYS, generator=generator).to(query)
        if "by head" in self.masks:
            samples = SAMPLES if self.batched else 1
            mask = torch.rand(samples * HEADS, LENGTH, KEYS, generator=generator) > 0.6
            mask[..., 0] = False
            kwargs["attn_mask"] = mask
        if "padding" in self.masks:
            padding = torch.zeros((SAMPLES, KEYS) if self.batched else (KEYS,), dtype=torch.bool)
            padding[..., -2:] = True
            kwargs["key_padding_mask"] = padding
        output, weights = self.attention(query, key, value, **kwargs)
        return output if weights is None else (output, weights)


def tensors(options: dict[str, Any], batched: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    widths = (EMBED, options.get("kdim", EMBED), options.get("vdim", EMBED))
    lengths = (LENGTH, KEYS, KEYS)
    shapes = [(SAMPLES, length, width) for length, width in zip(lengths, widths, strict=True)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if not batched:
        made = [x[0] for x in made]
    elif not options.get("batch_first", False):
        made = [x.transpose(0, 1) for x in made]
    return made[0], made[1], made[2]


OPTIONS: list[dict[str, Any]] = [
    {"batch_first": True},
    {"batch_first": False, "bias": False},
    {"batch_first": True, "kdim": 6, "vdim": 10},
    {"batch_first": False, "add_bias_kv": True},
    {"batch_first": True, "add_zero_attn": True},
    {"batch_first": True, "add_bias_kv": True, "add_zero_attn": True, "kdim": 6},
]
CALLS: list[dict[str, Any]] = [
    {"need_weights": False},
    {"need_weights": True},
    {"need_weights": True, "average_attn_weights": False},
]
MASKS = [(), ("causal",), ("float", "padding"), ("by head",), ("by head", "padding"), ("padding",)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_option_is_proven_equal_to_torch_s_own(options: dict[str, Any], call: dict[str, Any]) -> None:
    for masks, batched in itertools.product(MASKS, (True, False)):
        torch.manual_seed(0)
        model = Attention(options, call, masks, batched).double()
        for size in (2, 4):
            (region,) = lightning_tp.find_plan(model, tensors(options, batched), size).regions
            assert region.found_by == "adapter" and region.error < 1e-12, (masks, batched)
            names = {shard.parameter.removeprefix("attention.") for shard in region.shards}
            expected = {n for n, p in model.attention.named_parameters() if n != "out_proj.bias"}
            assert names == expected, (masks, batched)


def test_a_size_that_cuts_heads_names_the_legal_ones() -> None:
    model = Attention({"batch_first": True}, {"need_weights": False}, (), True).double()
    for size in (3, 8):
        with pytest.raises(ParallelConfigError, match=rf"tensor_parallel_size={size} .*Legal sizes: \[1, 2, 4\]"):
            lightning_tp.find_plan(model, tensors({"batch_first": True}, True), size)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).double()


def padded() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, LENGTH, EMBED, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    padding = torch.zeros(SAMPLES, LENGTH, dtype=torch.bool)
    padding[0, 3:] = True
    return x, padding


def evaluated_on_ranks(plan_for: dict[str, str] | None) -> tuple[float, list[Tensor]]:
    model, (x, padding) = encoder(), padded()
    size = dist.get_world_size()
    plan = lightning_tp.find_plan(model, x, size, styles=plan_for)
    lightning_tp.parallelize(model, ParallelLayout(1, size).device_mesh("cpu"), plan)
    model.eval()
    with torch.no_grad():
        found = [model(x), model(x, src_key_padding_mask=padding)]
    with torch.inference_mode():
        found.append(model(x).clone())
    return plan.split_share, found


@pytest.mark.parametrize("styles", [None, {"*.linear1": "column", "*.linear2": "row"}])
def test_evaluation_does_not_take_torch_s_fused_path_past_the_split(ranks2: RankPool, styles: Any) -> None:
    model, (x, padding) = encoder().eval(), padded()
    with torch.no_grad():
        expected = [model(x), model(x, src_key_padding_mask=padding), model(x)]
    for share, found in ranks2.run(evaluated_on_ranks, styles):
        assert share == 1.0 if styles is None else 0.4 < share < 0.8
        for ours, theirs in zip(found, expected, strict=True):
            # Behind padding torch's fused path leaves zeros, its other path numbers that nobody reads.
            seen = ours.shape[1] == theirs.shape[1]
            assert seen and relative(ours[1:], theirs[1:]) < 1e-10
            assert relative(ours[0, :3], theirs[0, :3]) < 1e-10


def test_a_mapping_splits_attention_by_the_name_of_its_module() -> None:
    model, (x, _) = encoder(), padded()
    plan = lightning_tp.find_plan(model, x, 2, styles={"layers.0.self_attn": "split"})
    assert [region.module for region in plan.regions] == ["layers.0.self_attn"]
    with pytest.raises(PlanError, match="matches no module"):
        lightning_tp.find_plan(model, x, 2, styles={"layers.7.self_attn": "split"})
    with pytest.raises(PlanError, match=r"asks to split layers\.0\.norm1"):
        lightning_tp.find_plan(model, x, 2, styles={"layers.0.norm1": "split"})
