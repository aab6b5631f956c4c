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


class DropoutOff(TorchFunctionMode):
    """While active, dropout passes its input on unchanged: ``nn.Dropout`` and its kin, attention and recurrent layers.

    Masks that a model draws with its own code (``torch.bernoulli``, ``torch.rand``) are not dropout to this mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest_probability = 0.0
        """The largest dropout probability that was asked for in training."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUT_ARGUMENTS:
            args = self._switch_off(*_DROPOUT_ARGUMENTS[func], args, kwargs)
        elif func in _RECURRENT:
            # The probability is the only float among the arguments, whose order depends on packing.
            for value in args:
                if isinstance(value, float):
                    self.largest_probability = max(self.largest_probability, value)
            args = tuple(0.0 if isinstance(value, float) else value for value in args)
        return func(*args, **kwargs)

    def _switch_off(
        self,
        position: int,
        name: str,
        default: float,
        training_position: int | None,
        training_name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, ...]:
        """Set the probability to zero in ``kwargs`` (in place) or in the returned ``args``."""
        probability = args[position] if len(args) > position else kwargs.get(name, default)
        training = training_position is None or (
            args[training_position] if len(args) > training_position else kwargs.get(training_name, True)
        )
        if training:
            self.largest_probability = max(self.largest_probability, probability)
        if len(args) > position:
            return (*args[:position], 0.0, *args[position + 1 :])
        kwargs[name] = 0.0
        return args
