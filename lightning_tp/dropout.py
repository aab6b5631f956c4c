"""Switches every dropout off, so that runs with different random masks can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# Position and name of the dropout probability, its default, and position and name of the training flag if there is one.
_DROPOUT_ARGUMENTS: dict[Callable[..., Any], tuple[int, str, float, int | None, str]] = {
    **{
        function: (1, "p", 0.5, 2, "training")
        for function in (
            F.dropout,
            F.dropout1d,
            F.dropout2d,
            F.dropout3d,
            F.alpha_dropout,
            F.feature_alpha_dropout,
        )
    },
    **{
        function: (1, "p", 0.5, 2, "train")
        for function in (
            torch.dropout,
            torch.dropout_,
            torch.native_dropout,
            torch.alpha_dropout,
            torch.alpha_dropout_,
            torch.feature_dropout,
            torch.feature_dropout_,
            torch.feature_alpha_dropout,
            torch.feature_alpha_dropout_,
        )
    },
    F.scaled_dot_product_attention: (4, "dropout_p", 0.0, None, ""),
    F.multi_head_attention_forward: (10, "dropout_p", 0.0, 13, "training"),
}
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
DROPOUT_FUNCTIONS = (*_DROPOUT_ARGUMENTS, *_RECURRENT)
"""The functions that draw masks, if their arguments say so."""


def without_dropout(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], float]:
    """The arguments of a call with its dropout switched off, and the probability with which it would have dropped.

    Known are the functions behind ``nn.Dropout`` and its kin, attention, and recurrent layers. Masks that a model
    draws with its own code (``torch.bernoulli``, ``torch.rand``) are not dropout here.
    """
    if function in _RECURRENT:
        # The probability is the only float among the arguments, whose order depends on packing.
        probability = max((value for value in args if isinstance(value, float)), default=0.0)
        return tuple(0.0 if isinstance(value, float) else value for value in args), kwargs, probability
    if function not in _DROPOUT_ARGUMENTS:
        return args, kwargs, 0.0
    position, name, default, training_position, training_name = _DROPOUT_ARGUMENTS[function]
    probability = args[position] if len(args) > position else kwargs.get(name, default)
    training = training_position is None or (
        args[training_position] if len(args) > training_position else kwargs.get(training_name, True)
    )
    if len(args) > position:
        args = (*args[:position], 0.0, *args[position + 1 :])
    else:
        kwargs = {**kwargs, name: 0.0}
    return args, kwargs, probability if training else 0.0


class DropoutOff(TorchFunctionMode):
    """While active, dropout passes its input on unchanged (see :func:`without_dropout`)."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_probability = 0.0
        """The largest dropout probability that was asked for in training."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs, probability = without_dropout(func, args, kwargs or {})
        self.largest_probability = max(self.largest_probability, probability)
        return func(*args, **kwargs)
