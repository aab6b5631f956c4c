"""``torch.nn.MultiheadAttention`` on one rank's heads."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def multihead_attention_share(
    module: nn.MultiheadAttention,
    rank: int,
    size: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What the heads of ``rank`` add to the results of ``module.forward``: the sum over the ranks is the result.

    The arguments and results are those of :class:`torch.nn.MultiheadAttention`, with every option of it; the formulas
    are those of arXiv:1706.03762. With N the batch, L and S the lengths of query and key, E the width, R the ranks:

    ==================  ==============================  =======================
    tensor              whole                           on one rank
    ==================  ==============================  =======================
    query, key, value   ``[N, L or S, E]``              the same
    in-projections      ``[3 E, E]``                    ``[3 E/R, E]``
    bias_k, bias_v      ``[1, 1, E]``                   ``[1, 1, E/R]``
    out_proj.weight     ``[E, E]``                      ``[E, E/R]``
    attention weights   ``[N, heads, L, S]``            ``[N, heads/R, L, S]``
    ==================  ==============================  =======================

    Raises:
        ValueError: nested tensors, masks of other shapes than torch takes, or ``is_causal`` without ``attn_mask``.
    """
    if query.is_nested or key.is_nested or value.is_nested:
        raise ValueError("Tensor-parallel nn.MultiheadAttention does not take nested tensors; pad them.")
    if is_causal and attn_mask is None:
        raise ValueError("nn.MultiheadAttention takes is_causal as a hint only: attn_mask must be given with it.")
    batched = query.dim() == 3
    query, key, value = (_batch_first(x, batched, module.batch_first) for x in (query, key, value))
    if not batched and key_padding_mask is not None:
        key_padding_mask = key_padding_mask[None]
    heads, width, samples = module.num_heads // size, module.head_dim, query.shape[0]
    q, k, v = _projected(module, query, key, value)
    mask = _attention_mask(attn_mask, samples, module.num_heads, rank, heads, q.dtype)
    padding = None if key_padding_mask is None else _additive(key_padding_mask, q.dtype)[:, None, None, :]
    if is_causal and (padding is not None or need_weights):
        is_causal = False
    elif is_causal:
        mask = None
    added = []
    if module.bias_k is not None and module.bias_v is not None:
        added.append((module.bias_k.expand(samples, 1, -1), module.bias_v.expand(samples, 1, -1)))
    if module.add_zero_attn:
        zeros = q.new_zeros(samples, 1, heads * width)
        added.append((zeros, zeros))
    for more_k, more_v in added:
        k, v = torch.cat([k, more_k], 1), torch.cat([v, more_v], 1)
        mask = None if mask is None else F.pad(mask, (0, 1))
        padding = None if padding is None else F.pad(padding, (0, 1))
    q, k, v = (x.unflatten(-1, (heads, width)).transpose(1, 2) for x in (q, k, v))
    if padding is not None:
        mask = padding if mask is None else mask + padding
    dropout = module.dropout if module.training else 0.0
    weights: Tensor | None = None
    if need_weights:
        scores = (q * math.sqrt(1.0 / width)) @ k.transpose(-1, -2)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        heads_out = weights @ v
        weights = _all_heads(weights, module.num_heads, rank, average_attn_weights)
        weights = weights if batched else weights[0]
    else:
        heads_out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    y = F.linear(heads_out.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    if not batched:
        return y[0], weights
    return y if module.batch_first else y.transpose(0, 1), weights


def _batch_first(x: Tensor, batched: bool, batch_first: bool) -> Tensor:
    if not batched:
        return x[None]
    return x if batch_first else x.transpose(0, 1)


def _projected(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, Any, Any]:
    if module._qkv_same_embed_dim:
        weights: Any = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    return q, k, v


def _attention_mask(
    mask: Tensor | None, samples: int, all_heads: int, rank: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """The mask as an addend ``[1 or N, 1 or heads/R, L, S]``."""
    if mask is None:
        return None
    mask = _additive(mask, dtype)
    if mask.dim() == 2:
        return mask[None, None]
    if mask.dim() != 3 or mask.shape[0] != samples * all_heads:
        raise ValueError(
            f"attn_mask has the shape {tuple(mask.shape)}; nn.MultiheadAttention takes [L, S] or "
            f"[batch x heads, L, S] = [{samples * all_heads}, L, S]."
        )
    return mask.unflatten(0, (samples, all_heads))[:, rank * heads : (rank + 1) * heads]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is true where nothing may be seen, or already an addend, as an addend."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))


def _all_heads(weights: Tensor, all_heads: int, rank: int, average: bool) -> Tensor:
    """This rank's addend of the weights of all heads, or of their mean."""
    if average:
        return weights.sum(1) / all_heads
    heads = weights.shape[1]
    return F.pad(weights, (0, 0, 0, 0, rank * heads, all_heads - (rank + 1) * heads))
