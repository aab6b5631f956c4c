"""Dropout inside a region of compiled code: each rank its own masks, and the same ones on recomputation.

Traced code cannot switch generators as :class:`RankRandomness` does, and inductor draws with one of its own. So each
dropout takes a seed from the common stream, in the graph, to which the rank is added; masks are functions of that seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_tp.dropout import DROPOUT_FUNCTIONS, without_dropout
from lightning_tp.parallel.random import LARGEST_SEED, RankRandomness, default_generator

# CUDA graphs would replay one mask for ever.
_TAGS = (torch.Tag.cudagraph_unsafe,)


class RankDropout(TorchFunctionMode):
    """While active, and between columns and rows of a region, dropout draws the masks of this rank."""

    def __init__(self, randomness: Sequence[RankRandomness]) -> None:
        super().__init__()
        self._randomness = randomness

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is checkpoint:  # traced as one call: what it calls is to be seen as well
            return function(self._seeing(args[0]), *args[1:], **kwargs)
        for randomness in self._randomness:
            if randomness.inside and function in _ON_ONE_RANK:
                return _ON_ONE_RANK[function](randomness.rank, *args, **kwargs)
            if randomness.inside and function in _NOT_TRACED and without_dropout(function, args, kwargs)[2]:
                torch._dynamo.graph_break("this kind of dropout runs uncompiled inside a tensor-parallel region")
        return function(*args, **kwargs)

    def _seeing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return seen


def _seed(rank: int) -> Tensor:
    """On the host, where reading it costs no synchronisation; the common stream moves on alike on all ranks."""
    return torch.randint(LARGEST_SEED, (), device="cpu") + rank


def _masked(x: Tensor, shape: Sequence[int], p: float, rank: int, inplace: bool) -> Tensor:
    """``x`` times a mask of ``shape``, which is broadcast, scaled to keep the mean."""
    kept = keep_mask(x, list(shape), p, _seed(rank))
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return x.mul_(kept * scale) if inplace else x * kept * scale


def _dropout(rank: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return _masked(input, input.shape, p, rank, inplace) if training and p > 0.0 else input


def _feature_dropout(rank: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``input [N, C, ...]``: whole features of a sample are dropped."""
    if not training or p == 0.0:
        return input
    return _masked(input, [*input.shape[:2], *[1] * (input.dim() - 2)], p, rank, inplace)


def _batched_feature_dropout(dims: int) -> Callable[..., Tensor]:
    """For the functions that take ``[C, ...]`` with ``dims`` dims too."""

    def dropped(rank: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if input.dim() == dims:
            return _feature_dropout(rank, input.unsqueeze(0), p, training, inplace).squeeze(0)
        return _feature_dropout(rank, input, p, training, inplace)

    return dropped


def _native_dropout(rank: int, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0.0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    kept = keep_mask(input, list(input.shape), p, _seed(rank))
    return input * kept * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), kept


def _attention(
    rank: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p == 0.0:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        attn_mask = attn_mask if attn_mask is None or attn_mask.dtype is torch.bool else attn_mask.to(dtype)
    return attention(query, key, value, attn_mask, _seed(rank), dropout_p, is_causal, scale, enable_gqa)


def _of_torch(dropped: Callable[..., Tensor], inplace: bool) -> Callable[..., Tensor]:
    """For the functions of ``torch``, which call the flag ``train``."""
    return lambda rank, input, p, train: dropped(rank, input, p, train, inplace)


_ON_ONE_RANK: dict[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: _dropout,
    F.dropout1d: _batched_feature_dropout(2),
    F.dropout2d: _feature_dropout,
    F.dropout3d: _batched_feature_dropout(4),
    torch.dropout: _of_torch(_dropout, False),
    torch.dropout_: _of_torch(_dropout, True),
    torch.feature_dropout: _of_torch(_feature_dropout, False),
    torch.feature_dropout_: _of_torch(_feature_dropout, True),
    torch.native_dropout: _native_dropout,
    F.scaled_dot_product_attention: _attention,
}
"""By function: what draws on one rank."""
_NOT_TRACED = tuple(function for function in DROPOUT_FUNCTIONS if function not in _ON_ONE_RANK)


@torch.library.custom_op("lightning_tp::keep_mask", mutates_args=(), tags=_TAGS)
def keep_mask(like: Tensor, shape: list[int], p: float, seed: Tensor) -> Tensor:
    """A mask of ``shape`` on the device of ``like``, each element true with the probability ``1 - p``."""
    generator = torch.Generator(like.device).manual_seed(int(seed))
    return torch.empty(shape, dtype=torch.bool, device=like.device).bernoulli_(1.0 - p, generator=generator)


@keep_mask.register_fake
def _(like: Tensor, shape: list[int], p: float, seed: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=like.device)


@contextmanager
def _stream(device: torch.device, seed: Tensor) -> Iterator[None]:
    """The default generator starts from ``seed`` inside, and is behind it what it was."""
    generator = default_generator(device)
    before = generator.get_state()
    generator.manual_seed(int(seed))
    try:
        yield
    finally:
        generator.set_state(before)


@contextmanager
def _differentiable() -> Iterator[None]:
    """Autograd, which is off while an operator runs."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


@torch.library.custom_op("lightning_tp::attention", mutates_args=(), tags=_TAGS)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    seed: Tensor,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """``F.scaled_dot_product_attention`` with dropout from ``seed``; its backward runs it again from the same one."""
    with _stream(query.device, seed):
        y = F.scaled_dot_product_attention(
            query, key, value, attn_mask, p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return y.contiguous()


@attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    seed: Tensor,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@torch.library.custom_op("lightning_tp::attention_backward", mutates_args=(), tags=_TAGS)
def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    seed: Tensor,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    mask_grad: bool,
) -> list[Tensor]:
    """Gradients of query, key, value, and of the mask if it is asked for."""
    with _differentiable(), _stream(query.device, seed):
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        mask = attn_mask
        if mask is not None and mask_grad:
            mask = mask.detach().requires_grad_()
            inputs.append(mask)
        y = F.scaled_dot_product_attention(
            inputs[0], inputs[1], inputs[2], mask, p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return [found.contiguous() for found in torch.autograd.grad(y, inputs, grad)]


@attention_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    seed: Tensor,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    mask_grad: bool,
) -> list[Tensor]:
    inputs = [query, key, value, *([attn_mask] if attn_mask is not None and mask_grad else [])]
    return [x.new_empty(x.shape) for x in inputs]


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, attn_mask, seed, *options = inputs
    ctx.save_for_backward(query, key, value, attn_mask, seed)
    ctx.options = options


def _attention_grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    mask_grad = ctx.needs_input_grad[3]
    found = attention_backward(grad, *ctx.saved_tensors, *ctx.options, mask_grad)
    return (found[0], found[1], found[2], found[3] if mask_grad else None, *[None] * 5)


attention.register_autograd(_attention_grads, setup_context=_keep_inputs)
