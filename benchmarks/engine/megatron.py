"""The model written by hand in the style of Megatron-LM (arXiv:1909.08053): plain tensors, nothing else.

With ``R`` ranks, ``T`` tokens, ``H`` features, ``F`` features of the feed-forward layer:

=================  ===============  ==============================================
tensor             on one rank      communication
=================  ===============  ==============================================
q, k, v weights    ``[H/R, H]``     their input's gradient ``[T, H]``: all-reduce
o weight           ``[H, H/R]``     its output ``[T, H]``: all-reduce
gate, up weights   ``[F/R, H]``     their input's gradient ``[T, H]``: all-reduce
down weight        ``[H, F/R]``     its output ``[T, H]``: all-reduce
all others         whole            none
=================  ===============  ==============================================
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engine.one_process import OneProcessCompiled
from benchmarks.engine.peer import Peer
from recipes.llama import LlamaModule, rotate


def all_reduce(x: Tensor) -> Tensor:
    """The sum of ``x`` over the ranks, in its place where the code is not compiled."""
    if torch.compiler.is_compiling():
        return functional_collectives.all_reduce(x, "sum", dist.group.WORLD)
    dist.all_reduce(x)
    return x


class Enter(torch.autograd.Function):
    """Identity forward, all-reduce of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return all_reduce(gradient)


class Leave(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class ShardedAttention(nn.Module):
    """This rank's heads."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, head_dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v = _column(q), _column(k), _column(v)
        self.o = _row(o)
        self.head_dim = head_dim

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        x = Enter.apply(x)
        q, k, v = (
            F.linear(x, weight).view(batch, sequence, -1, self.head_dim).transpose(1, 2)
            for weight in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return Leave.apply(F.linear(y.transpose(1, 2).reshape(batch, sequence, -1), self.o))


class ShardedFeedForward(nn.Module):
    """This rank's features."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate, self.up = _column(gate), _column(up)
        self.down = _row(down)

    def forward(self, x: Tensor) -> Tensor:
        x = Enter.apply(x)
        return Leave.apply(F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down))


class ShardedBlock(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        attention, feed_forward = block.attention, block.feed_forward
        self.attention_norm, self.feed_forward_norm = block.attention_norm, block.feed_forward_norm
        self.attention = ShardedAttention(
            attention.q_proj.weight,
            attention.k_proj.weight,
            attention.v_proj.weight,
            attention.o_proj.weight,
            attention.head_dim,
        )
        self.feed_forward = ShardedFeedForward(
            feed_forward.gate_proj.weight, feed_forward.up_proj.weight, feed_forward.down_proj.weight
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class ShardedLlama(nn.Module):
    """What one rank holds of ``whole``, whose key/value heads are as many as its query heads."""

    def __init__(self, whole: LlamaModule) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = whole.embedding, whole.norm, whole.head
        self.blocks = nn.ModuleList(ShardedBlock(block) for block in whole.blocks)
        self.cos, self.sin = nn.Buffer(whole.cos), nn.Buffer(whole.sin)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.size(1)], self.sin[: tokens.size(1)]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def _column(weight: Tensor) -> nn.Parameter:
    """This rank's output features of ``weight [out, in]``: ``[out/R, in]``."""
    return _part(weight, 0)


def _row(weight: Tensor) -> nn.Parameter:
    """This rank's input features of ``weight [out, in]``: ``[out, in/R]``."""
    return _part(weight, 1)


def _part(weight: Tensor, dim: int) -> nn.Parameter:
    return nn.Parameter(weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


class HandWritten(Peer):
    name = "hand-written, Megatron style"
    note = "plain tensors and two autograd functions; `benchmarks/engine/megatron.py`"

    def build(self) -> nn.Module:
        return ShardedLlama(self.setting.model())

    def is_split(self, parameter: Tensor) -> bool:
        names = {id(p): name for name, p in self.model.named_parameters()}
        return names[id(parameter)].endswith(tuple(f".{name}" for name in ("q", "k", "v", "o", "gate", "up", "down")))


class HandWrittenCompiled(HandWritten):
    name = "hand-written, compiled"
    note = "`torch.compile` of the whole model"
    whole = OneProcessCompiled.name

    def build(self) -> nn.Module:
        model = super().build()
        model.compile()
        return model
