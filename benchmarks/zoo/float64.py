"""Float64 throughout: code that asks for float32 in between gets float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_tp.testing.plain_module import PlainModule


class KeepFloat64(TorchFunctionMode):
    """While active, no function rounds to float32.

    Many models compute norms, softmax and router scores in float32 whatever their precision. Two runs of them that
    differ by rounding then differ by 1e-7, or not at all, and an error below that stays unseen.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(_widened(argument) for argument in args)
        kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _widened(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


class Float64Module(PlainModule):
    """A module that is trained in float64 throughout."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with KeepFloat64():
            return super().training_step(batch, batch_idx)
