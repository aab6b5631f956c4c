"""A GPT-2 style decoder: fused query/key/value, GELU, LayerNorm, learned positions, biases and dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.language_model import LanguageModel, OptimizerFactory


class CausalSelfAttention(nn.Module):
    """Causal attention with one linear layer for queries, keys and values."""

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.n_embd = n_embd
        self.n_head = n_head
        self.dropout = dropout
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.residual_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two linear layers, four times as wide in between."""

    def __init__(self, n_embd: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * n_embd, n_embd)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.residual_dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Attention and MLP, each on a normed input and added to the residual stream."""

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, dropout)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = MLP(n_embd, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPTModule(LanguageModel):
    """GPT-2 style language model; ``forward`` maps tokens ``[batch, seq]`` to logits ``[batch, seq, vocab_size]``.

    Args:
        block_size: number of learned positions, so the longest sequence.
        dropout: probability for the embedding, the attention weights and both outputs of a block.
        optimizer, warmup_steps, final_lr_ratio: see :class:`LanguageModel`.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        block_size: int = 256,
        dropout: float = 0.1,
        optimizer: OptimizerFactory | None = None,
        warmup_steps: int = 100,
        final_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__(block_size, optimizer, warmup_steps, final_lr_ratio)
        if hidden_size % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide hidden_size={hidden_size}.")
        self.save_hyperparameters(ignore=["optimizer"])
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Embedding(block_size, hidden_size)
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads, dropout) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size)
        self.init_weights(num_layers, residual_outputs="c_proj.weight")

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.embedding_dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))
