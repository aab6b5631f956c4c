"""Masks of dropout over the ranks, in eager and in compiled code, and when activations are recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_tp
from lightning_tp.layout import ParallelLayout
from lightning_tp.parallel.compiled_dropout import attention
from lightning_tp.testing import RankPool, whole

WIDTH, TOKENS, P = 8, 64, 0.25


class Masks(nn.Module):
    """Returns its masks: of the hidden features in the digits ``1`` and ``10``, of the output in the digit ``100``.

    ``up`` gives ones, and ``down`` adds feature j of the first half of the hidden ones to ten times that of the second.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.checkpointed = ""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.dropped, x, use_reentrant=False) if self.checkpointed == "whole" else self.dropped(x)

    def dropped(self, x: Tensor) -> Tensor:
        y = self.down(
            checkpoint(self.hidden, x, use_reentrant=False) if self.checkpointed == "part" else self.hidden(x)
        )
        return y + 100 * F.dropout(torch.ones_like(y), P, self.training)

    def hidden(self, x: Tensor) -> Tensor:
        return F.dropout(self.up(x), P, self.training)

    @torch.no_grad()
    def fill(self) -> None:
        """Give the weights their values, once the plan is found."""
        for parameter in self.parameters():
            parameter.zero_()
        self.up.bias.fill_(1.0)
        self.down.weight.copy_(torch.cat([torch.eye(WIDTH), 10 * torch.eye(WIDTH)], 1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.masks = nn.LayerNorm(WIDTH), Masks()

    def forward(self, x: Tensor) -> Tensor:
        return self.masks(self.norm(x))


def masks_on_ranks(how: str, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Two runs' outputs in training, and the gradient of ``up.bias`` of the second."""
    torch.manual_seed(0)
    size = dist.get_world_size()
    model = Model()
    x = torch.randn(TOKENS, WIDTH)
    plan = lightning_tp.find_plan(model, x, size)
    assert [region.random for region in plan.regions] == [True]
    model.masks.fill()
    lightning_tp.parallelize(model, ParallelLayout(1, size).device_mesh("cpu"), plan)
    model.masks.checkpointed = how.removeprefix("eager, checkpointed ") if "checkpointed" in how else ""
    torch._dynamo.reset()
    run: Any = torch.compile(model, backend=backend, fullgraph=True) if "compiled" in how else model
    if "in a checkpoint" in how:
        compiled, run = run, lambda x: checkpoint(compiled, x, use_reentrant=False)
    torch.manual_seed(1)
    first = run(x)
    first.sum().backward()
    model.zero_grad()
    second = run(x)
    second.sum().backward()
    torch._dynamo.reset()
    grad = model.masks.up.bias.grad
    assert grad is not None
    return first.detach(), second.detach(), whole(grad)


def decoded(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three masks in ``y``: of each half of the hidden features, and of the output."""
    digits = (y * (1 - P)).round().long()
    masks = (digits % 10, digits // 10 % 10, digits // 100)
    assert torch.equal(masks[0] + 10 * masks[1] + 100 * masks[2], digits)
    return masks


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ("eager", ""),
        ("eager, checkpointed whole", ""),
        ("eager, checkpointed part", ""),
        ("compiled", "aot_eager"),
        ("compiled", "inductor"),
        ("compiled in a checkpoint", "aot_eager"),
    ],
)
def test_ranks_drop_different_features_inside_a_region_and_the_same_outside(
    ranks2: RankPool, how: str, backend: str
) -> None:
    one, two = ranks2.run(masks_on_ranks, how, backend, timeout=300.0)
    for rank_one, rank_two in zip(one, two, strict=True):
        assert torch.equal(rank_one, rank_two)
    first, second, grad = one
    assert not torch.equal(first, second)
    masks = decoded(second)
    for mask in masks:
        assert mask.unique().tolist() == [0, 1]
        assert abs(mask.double().mean() - (1 - P)) < 5 * (P * (1 - P) / mask.numel()) ** 0.5
    for left, right in ((0, 1), (0, 2), (1, 2)):
        agree = (masks[left] == masks[right]).double().mean()
        assert abs(agree - (P**2 + (1 - P) ** 2)) < 0.1  # as independent masks do
    # The gradient of feature j's bias is its weight times the number of tokens that kept it: the masks of the forward.
    kept = torch.cat([masks[0].sum(0), 10 * masks[1].sum(0)])
    torch.testing.assert_close(grad, kept / (1 - P), rtol=1e-5, atol=1e-5)


def test_attention_from_a_seed_is_torchs_attention_with_that_seed() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    inputs = (query, key, value, mask)
    y = attention(*inputs, torch.tensor(7), 0.3, False, 0.5, False)
    torch.manual_seed(7)
    expected = F.scaled_dot_product_attention(query, key, value, mask, 0.3, False, scale=0.5)
    assert torch.equal(y, expected)
    grad = torch.randn(y.shape, dtype=torch.float64)
    for found, wanted in zip(
        torch.autograd.grad(y, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
