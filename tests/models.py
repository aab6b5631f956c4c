"""Small models, each with something that a split can get wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LENGTH = 16, 4, 6


class SelfAttention(nn.Module):
    """Attention in the idioms people write: how q, k, v leave one fused linear, and what else touches them."""

    def __init__(self, layout: str = "split", heads: int = HEADS, norm: str = "", bias: str = "") -> None:
        super().__init__()
        self.layout, self.heads, self.norm = layout, heads, norm
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        if norm:
            features = WIDTH // heads if norm == "head" else WIDTH
            self.q_norm, self.k_norm = nn.RMSNorm(features), nn.RMSNorm(features)
        self.bias = nn.Parameter(torch.randn(heads, LENGTH, LENGTH)) if bias == "relative" else None

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        z = self.qkv(x)
        if self.layout == "split":
            q, k, v = z.split(width, dim=2)
        elif self.layout == "chunk":
            q, k, v = z.chunk(3, dim=-1)
        elif self.layout == "slice":
            q, k, v = z[..., :width], z[..., width : 2 * width], z[..., 2 * width :]
        elif self.layout == "view three first":
            q, k, v = z.view(batch, length, 3, width).unbind(2)
        elif self.layout == "view heads first":
            q, k, v = (t.flatten(2) for t in z.view(batch, length, self.heads, 3, -1).unbind(3))
        else:
            raise ValueError(self.layout)
        if self.norm == "whole":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        if self.norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias, is_causal=self.bias is None)
        return self.proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self, kind: str = "gelu", hidden: int = 32) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(WIDTH, 2 * hidden if "gate" in kind else hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.kind == "fused gate":
            gate, value = y.chunk(2, dim=-1)
            return self.down(F.silu(gate) * value)
        if self.kind == "interleaved gate":
            return self.down(F.silu(y[..., ::2]) * y[..., 1::2])
        return self.down(F.relu(y) if self.kind == "relu" else F.gelu(y))


class Stack(nn.Module):
    """Pre-norm residual blocks on ``[batch, LENGTH, WIDTH]``, and a head."""

    def __init__(self, *blocks: nn.Module, final_norm: bool = True) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in blocks)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH) if final_norm else nn.Identity()
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(self.norm(x))


class ParallelBlock(nn.Module):
    """Attention and feed-forward in one forward, with shared attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.o(y) + self.down(F.gelu(self.up(x)))


class SilentlyWrong(nn.Module):
    """Runs without an error on half the heads if only sizes are inferred, and mixes heads and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head_size = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        q, k, v = (
            m(x).view(batch, -1, self.num_heads, self.head_size).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(x.shape))


class ReturnsItsWeights(nn.Module):
    """Its attention also returns the weights of all heads, which nobody uses."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = (m(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for m in (self.q, self.k, self.v))
            weights = (q @ k.transpose(-1, -2)).softmax(-1)
            return self.o((weights @ v).transpose(1, 2).flatten(2)), weights

    def __init__(self) -> None:
        super().__init__()
        self.attention = self.Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)[0]


class SaysItsHeads(nn.Module):
    """Its attention also returns a tensor for each head, which what follows would misread for half of the heads."""

    class Attention(SilentlyWrong):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x), torch.ones(self.num_heads, device=x.device)  # type: ignore[return-value]

    def __init__(self) -> None:
        super().__init__()
        self.attention = self.Attention()

    def forward(self, x: Tensor) -> Tensor:
        y, ones = self.attention(x)
        return y * ones.sum()


class Gated(nn.Module):
    """A zero-initialised scale and a zero-initialised projection hide what depends on what."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.scale = nn.Parameter(torch.zeros(WIDTH))
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.down(self.up(x) * F.silu(self.gate(x)))


class InnerScale(nn.Module):
    """A whole parameter is multiplied into the split hidden features: it cannot be used as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.scale = nn.Parameter(torch.randn(32))
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * self.scale * self.temperature)


class InnerScalar(nn.Module):
    """A scalar parameter inside a region: its gradient is a partial sum on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.temperature = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x) * self.temperature))


class Leaky(nn.Module):
    """The hidden features are used a second time, past the row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.extra = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        return self.down(y) + y.mean(-1, keepdim=True)


class Answer:
    """A container that is no tuple, list or dict."""

    def __init__(self, output: Tensor, hidden: Tensor) -> None:
        self.output, self.hidden = output, hidden


class ReturnsItsHidden(FeedForward):
    """Split features leave it in an object."""

    def forward(self, x: Tensor) -> Answer:  # type: ignore[override]
        hidden = F.gelu(self.up(x))
        return Answer(self.down(hidden), hidden)


class Unpacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ReturnsItsHidden()

    def forward(self, x: Tensor) -> Tensor:
        answer = self.inner(x)
        return answer.output + answer.hidden.mean()


class Decides(FeedForward):
    """What it computes depends on a number made from the hidden features."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return self.down(hidden) * (2.0 if hidden.sum() > 1e9 else hidden.mean().item())


class ByKeyword(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(input=F.gelu(self.up(input=x)))


class PartlyReadBefore(nn.Module):
    """One of two columns reads the same tensor once before, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.before = False

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            with torch.no_grad():
                self.up(x)
        return self.down(self.up(x) * torch.sigmoid(self.gate(x)))


class TwoRows(nn.Module):
    """Two rows read the same columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.a, self.b = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        return self.a(y) * torch.sigmoid(self.b(y))


class Shared(nn.Module):
    """One feed-forward called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.inner(x))


class ByHand(nn.Module):
    """A weight that is used without calling its module."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up.weight, self.up.bias)), self.down.weight)


class Expert(nn.Module):
    """No gradient passes where the model itself switches it off, and a batch norm follows in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.teacher = FeedForward()
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hint = self.teacher(x)
        return self.norm(self.down(F.gelu(self.up(x)))) + hint.detach()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.inner = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.rnn(x)[0])


class Listed(nn.Module):
    """Parameters in a ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(WIDTH))})
        self.inner = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scales[0]) * self.scales[1] + self.named["shift"]


# Name -> (how to build it, linears that are split at 2 ranks; None: of no concern here).
MODELS: dict[str, tuple[Callable[[], nn.Module], set[str] | None]] = {
    **{
        f"qkv {layout}": (
            lambda layout=layout: Stack(SelfAttention(layout), FeedForward()),
            {"blocks.0.qkv", "blocks.0.proj", "blocks.1.up", "blocks.1.down"},
        )
        for layout in ("split", "chunk", "slice", "view three first", "view heads first")
    },
    "q and k norms over heads": (
        lambda: Stack(SelfAttention("chunk", norm="head")),
        {"blocks.0.qkv", "blocks.0.proj"},
    ),
    "q and k norms over all features": (
        lambda: Stack(SelfAttention("chunk", norm="whole")),
        {"blocks.0.qkv", "blocks.0.q_norm.weight", "blocks.0.k_norm.weight", "blocks.0.proj"},
    ),
    "bias for each head": (
        lambda: Stack(SelfAttention("chunk", bias="relative")),
        {"blocks.0.qkv", "blocks.0.bias", "blocks.0.proj"},
    ),
    "relu": (lambda: Stack(FeedForward("relu")), {"blocks.0.up", "blocks.0.down"}),
    "fused gate": (lambda: Stack(FeedForward("fused gate")), {"blocks.0.up", "blocks.0.down"}),
    "interleaved gate": (lambda: Stack(FeedForward("interleaved gate")), {"blocks.0.up", "blocks.0.down"}),
    "attention and feed-forward in one forward": (
        lambda: Stack(ParallelBlock()),
        {f"blocks.0.{name}" for name in ("q", "k", "v", "o", "up", "down")},
    ),
    "silently wrong": (lambda: Stack(SilentlyWrong()), {f"blocks.0.{name}" for name in "qkvo"}),
    "returns its attention weights": (
        lambda: Stack(ReturnsItsWeights()),
        {f"blocks.0.attention.{name}" for name in "qkvo"},
    ),
    "says its number of heads": (
        lambda: Stack(SaysItsHeads()),
        {f"blocks.0.attention.{name}" for name in "qkvo"},
    ),
    "zeros hide": (lambda: Stack(Gated()), {"blocks.0.up", "blocks.0.gate", "blocks.0.down"}),
    "whole parameter inside": (lambda: Stack(InnerScale()), {"blocks.0.up", "blocks.0.scale", "blocks.0.down"}),
    "scalar parameter inside": (lambda: Stack(InnerScalar()), {"blocks.0.up", "blocks.0.down"}),
    "second use of the hidden features": (lambda: Stack(Leaky()), set()),
    "hidden features in an object": (lambda: Stack(Unpacked()), set()),
    "decides on hidden features": (lambda: Stack(Decides()), set()),
    "linears called by keyword": (lambda: Stack(ByKeyword()), {"blocks.0.up", "blocks.0.down"}),
    "two rows": (lambda: Stack(TwoRows()), {"blocks.0.up", "blocks.0.a", "blocks.0.b"}),
    "called twice": (lambda: Stack(Shared()), {"blocks.0.inner.up", "blocks.0.inner.down"}),
    "weights used by hand": (
        lambda: Stack(ByHand()),
        {"blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.down.weight"},
    ),
    "no gradient and batch norm": (
        lambda: Stack(Expert()),
        {"blocks.0.up", "blocks.0.down", "blocks.0.teacher.up", "blocks.0.teacher.down"},
    ),
    "no final norm": (lambda: Stack(SelfAttention("chunk"), FeedForward(), final_norm=False), None),
    "plain chain": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)),
        {"0", "2"},
    ),
    "recurrent": (lambda: Stack(Recurrent()), {"blocks.0.inner.up", "blocks.0.inner.down"}),
    "parameter lists": (lambda: Stack(Listed()), {"blocks.0.inner.up", "blocks.0.inner.down"}),
    "torch transformer": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        {
            f"layers.{layer}.{name}"
            for layer in (0, 1)
            for name in (
                "linear1",
                "linear2",
                "self_attn.in_proj_weight",
                "self_attn.in_proj_bias",
                "self_attn.out_proj.weight",
            )
        },
    ),
}
