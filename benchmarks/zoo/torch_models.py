"""Models in plain torch, in the idioms that people write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.architecture import (
    LENGTH,
    SAMPLES,
    VOCABULARY,
    Architecture,
    causal_batch,
    features_batch,
    unsettled,
)

WIDTH, HEADS, LAYERS = 64, 4, 2


class TorchEncoder(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 128, dropout=0.0, batch_first=batch_first, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device, dtype=x.dtype)
        y = self.encoder(x, mask=mask, is_causal=True)
        return y if self.batch_first else y.transpose(0, 1)


class TorchDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 128, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, LAYERS)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, x.flip(1))


class TorchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, 128, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device, dtype=x.dtype)
        return self.transformer(x, x.flip(0), tgt_mask=mask).transpose(0, 1)


class GPTAttention(nn.Module):
    """Causal attention with q, k, v in one linear, or in three, in the layouts people use."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH) if layout != "separate" else nn.Linear(WIDTH, WIDTH)
        if layout == "separate":
            self.k_attn, self.v_attn = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        head = c // self.n_head
        if self.layout == "split":
            q, k, v = (z.view(b, t, self.n_head, head) for z in self.c_attn(x).split(self.n_embd, dim=2))
        elif self.layout == "three first":
            q, k, v = self.c_attn(x).view(b, t, 3, self.n_head, head).unbind(2)
        elif self.layout == "heads first":
            q, k, v = self.c_attn(x).view(b, t, self.n_head, 3, head).unbind(3)
        else:
            q, k, v = (m(x).view(b, t, self.n_head, head) for m in (self.c_attn, self.k_attn, self.v_attn))
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class MLP(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class GPTBlock(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = GPTAttention(layout), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of ``logits [B, T, V]`` with the tokens one place later in ``labels [B, T]``."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class NanoGPT(nn.Module):
    """GPT with a tied head, after the shape of Karpathy's nanoGPT."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(GPTBlock(layout) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return {"logits": logits, "loss": next_token_loss(logits, labels)}


class MixerBlock(nn.Module):
    """Mixing over tokens and over channels (arXiv:2105.01601)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens, self.channels = MLP(LENGTH, 64), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_2(x))


class Blocks(nn.Module):
    """Blocks one after the other, and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RelativeAttention(nn.Module):
    """Attention with relative positions and a bias for content and position of each head (arXiv:1901.02860)."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.position = nn.Linear(WIDTH, WIDTH, bias=False)
        self.content_bias = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS) * 0.1)
        self.position_bias = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS) * 0.1)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.heads, -1)
        k, v = (m(x).view(b, t, self.heads, -1).transpose(1, 2) for m in (self.k, self.v))
        p = self.position(positions).view(1, -1, self.heads, k.shape[-1]).transpose(1, 2)
        content = (q + self.content_bias).transpose(1, 2) @ k.transpose(-1, -2)
        position = self.shifted((q + self.position_bias).transpose(1, 2) @ p.transpose(-1, -2))
        weights = ((content + position[..., :t]) / k.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, -1))

    @staticmethod
    def shifted(scores: Tensor) -> Tensor:
        b, h, t, n = scores.shape
        return F.pad(scores, (1, 0)).view(b, h, n + 1, t)[:, :, 1:].reshape(b, h, t, n)


class ConvolutionModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pointwise_in = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.pointwise_out = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.pointwise_in(x.transpose(1, 2)), dim=1)
        return self.pointwise_out(F.silu(self.norm(self.depthwise(y)))).transpose(1, 2)


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward (arXiv:2005.08100)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.first, self.second = MLP(), MLP()
        self.attention, self.convolution = RelativeAttention(), ConvolutionModule()

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.linspace(-1, 1, (2 * x.shape[1] - 1) * WIDTH, dtype=x.dtype, device=x.device)
        x = x + 0.5 * self.first(self.norms[0](x))
        x = x + self.attention(self.norms[1](x), positions.view(1, -1, WIDTH).sin())
        x = x + self.convolution(self.norms[2](x))
        x = x + 0.5 * self.second(self.norms[3](x))
        return self.norms[4](x)


class FusedAttention(nn.Module):
    """Attention as in vision transformers: ``reshape(B, N, 3, heads, head)``."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class DiTBlock(nn.Module):
    """Attention and feed-forward with shift, scale and gate from a condition, gates at zero (arXiv:2212.09748)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm_2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attn, self.mlp = FusedAttention(), MLP()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        nn.init.zeros_(self.modulation[1].weight)
        nn.init.zeros_(self.modulation[1].bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + gate_1 * self.attn(self.norm_1(x) * (1 + scale_1) + shift_1)
        return x + gate_2 * self.mlp(self.norm_2(x) * (1 + scale_2) + shift_2)


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.final_modulation, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.final_modulation(F.silu(condition))[:, None].chunk(2, dim=-1)
        return self.head(self.norm(x) * (1 + scale) + shift)


class LitGPT(nn.Module):
    """GPT of the package litgpt, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        try:
            from litgpt.config import Config
            from litgpt.model import GPT
        except ImportError as error:
            raise ImportError(
                f"The architecture litgpt needs the package litgpt ({error}). `make zoo` installs it; by hand: "
                "pip install --no-deps -c constraints.txt litgpt"
            ) from error
        self.gpt = GPT(Config(
            block_size=LENGTH, padded_vocab_size=VOCABULARY, vocab_size=VOCABULARY, n_layer=LAYERS, n_head=HEADS,
            n_query_groups=2, n_embd=WIDTH, rotary_percentage=1.0, parallel_residual=False, bias=False,
            norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=128,
        ))  # fmt: skip

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.gpt(input_ids)
        return {"logits": logits, "loss": next_token_loss(logits, labels)}


def dit_batch() -> dict[str, Any]:
    condition = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2))
    return {**features_batch(), "condition": condition}


def mixer() -> nn.Module:
    return Blocks(*(MixerBlock() for _ in range(LAYERS)))


def conformer() -> nn.Module:
    return Blocks(*(ConformerBlock() for _ in range(LAYERS)))


def _made(
    name: str,
    note: str,
    make: Callable[..., nn.Module],
    *arguments: Any,
    batch: Callable[[], dict[str, Any]] = features_batch,
    mechanism: str = "pairs",
    fast: bool = False,
) -> Architecture:
    return Architecture(name, partial(unsettled, make, *arguments), batch, note, mechanism, fast)


_TORCH_ATTENTION = "attention of torch"
TORCH = (
    _made("nn.TransformerEncoder", "causal, pre-norm", TorchEncoder, True, mechanism=_TORCH_ATTENTION, fast=True),
    _made("nn.TransformerEncoder, sequence first", "causal, pre-norm", TorchEncoder, False, mechanism=_TORCH_ATTENTION),
    _made("nn.TransformerDecoder", "cross-attention, post-norm", TorchDecoder, mechanism=_TORCH_ATTENTION),
    _made("nn.Transformer", "sequence first, post-norm", TorchTransformer, mechanism=_TORCH_ATTENTION),
    *(
        _made(f"nanoGPT, {layout}", note, NanoGPT, layout, batch=causal_batch, mechanism="sizes in calls", fast=fast)
        for layout, note, fast in (
            ("split", "fused q, k, v, cut into three", True),
            ("three first", "fused q, k, v, viewed as (3, heads, head)", False),
            ("heads first", "fused q, k, v, viewed as (heads, 3, head)", False),
            ("separate", "q, k, v in three linears", False),
        )
    ),
    _made("mixer", "feed-forwards over tokens and over channels", mixer),
    _made("conformer", "relative positions, convolutions, batch norm", conformer, mechanism="parameters of heads",
          fast=True),
    Architecture("DiT", DiT, dit_batch, "adaLN, its gates at zero", "zeros hide", fast=True),
    _made("DiT, open gates", "adaLN, as after some training", DiT, batch=dit_batch, mechanism="zeros hide"),
    _made("litgpt", "grouped queries in one linear", LitGPT, batch=causal_batch, mechanism="sizes in calls"),
)  # fmt: skip
