"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.language_model import LanguageModel, OptimizerFactory


def rotary_tables(head_dim: int, length: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[length, head_dim]`` of the rotary angles, halves repeated (https://arxiv.org/abs/2104.09864)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair ``(x[i], x[i + head_dim / 2])`` of ``x [batch, heads, sequence, head_dim]`` by its angle."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


class Attention(nn.Module):
    """Causal attention in which each key/value head serves ``num_heads / num_kv_heads`` query heads."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.q_proj(x).view(batch, seq, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, seq, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.num_heads // self.num_kv_heads
        if group > 1:  # repeating once would copy
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, seq, self.num_heads * self.head_dim))


class FeedForward(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and feed-forward, each on a normed input and added to the residual stream."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.attention = Attention(hidden_size, num_heads, num_kv_heads)
        self.feed_forward_norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.feed_forward = FeedForward(hidden_size, intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class LlamaModule(LanguageModel):
    """Llama-style language model; ``forward`` maps tokens ``[batch, seq]`` to logits ``[batch, seq, vocab_size]``.

    Args:
        intermediate_size: width of the feed-forward layer; if not given, 8/3 of ``hidden_size``, rounded up to a
            multiple of 32.
        num_kv_heads: key/value heads; must divide ``num_heads``.
        max_sequence_length: length of the rotary tables.
        tie_embeddings: use the token embedding as the output head.
        optimizer, warmup_steps, final_lr_ratio: see :class:`LanguageModel`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 256,
        intermediate_size: int | None = None,
        num_layers: int = 4,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        max_sequence_length: int = 256,
        tie_embeddings: bool = False,
        rotary_base: float = 10_000.0,
        optimizer: OptimizerFactory | None = None,
        warmup_steps: int = 100,
        final_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__(max_sequence_length, optimizer, warmup_steps, final_lr_ratio)
        if hidden_size % num_heads or (hidden_size // num_heads) % 2:
            raise ValueError(
                f"hidden_size={hidden_size} must be num_heads={num_heads} times an even head size. "
                "Change one of the two."
            )
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}.")
        self.save_hyperparameters(ignore=["optimizer"])
        if intermediate_size is None:
            intermediate_size = 32 * math.ceil(hidden_size * 8 / 3 / 32)
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(
            Block(hidden_size, intermediate_size, num_heads, num_kv_heads) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_tables(hidden_size // num_heads, max_sequence_length, rotary_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights(num_layers, residual_outputs=("o_proj.weight", "down_proj.weight"))

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.size(1)
        cos, sin = self.cos[:seq], self.sin[:seq]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))
