"""What is special to modules of torch itself when they run on shares: one entry for each class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_tp.parallel.attention import multihead_attention_share

LOCAL_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {nn.MultiheadAttention: multihead_attention_share}
"""By class: ``f(module, rank, size, *args, **kwargs)`` that computes what one rank adds to the module's results."""

_FUSED_PATHS: dict[type[nn.Module], dict[str, Any]] = {
    # In evaluation these pass their children's weights to one kernel, past the children's own forward.
    nn.TransformerEncoderLayer: {"activation_relu_or_gelu": 0},
    nn.TransformerEncoder: {"use_nested_tensor": False},
}


def local_forward(module: nn.Module) -> Callable[..., Any] | None:
    """What runs on a rank instead of ``module.forward``, for classes that need it."""
    for base, function in LOCAL_FORWARDS.items():
        if isinstance(module, base) and type(module).forward is base.forward:
            return function
    return None


def without_fused_paths(module: nn.Module) -> dict[str, Any]:
    """Attributes that keep ``module`` from passing by the forward of its children."""
    values: dict[str, Any] = {}
    for base, attributes in _FUSED_PATHS.items():
        if isinstance(module, base):
            values |= {name: value for name, value in attributes.items() if name in vars(module)}
    return values
