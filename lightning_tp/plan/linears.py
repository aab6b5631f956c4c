"""The linear modules that can be split: one adapter for each type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_tp.plan.sharding_plan import AttributeChange, Column


@dataclass(frozen=True)
class LinearAdapter:
    """What is special to one type of linear module.

    Attributes:
        type_name: Qualified name of the module's class, so that no optional package is imported.
        output_dim: Dim of the weight that runs over the output features; the other runs over the input features.
        output_attribute: Attribute that holds the number of output features.
        input_attribute: Attribute that holds the number of input features, if there is one.
    """

    type_name: str
    output_dim: int
    output_attribute: str
    input_attribute: str | None

    @property
    def input_dim(self) -> int:
        return 1 - self.output_dim

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x [..., in]`` times ``weight``, without bias: ``[..., out]``."""
        return F.linear(x, weight if self.output_dim == 0 else weight.t())


ADAPTERS = (
    LinearAdapter("torch.nn.modules.linear.Linear", 0, "out_features", "in_features"),
    LinearAdapter("transformers.pytorch_utils.Conv1D", 1, "nf", "nx"),
)


def linear_adapter(module: nn.Module) -> LinearAdapter | None:
    """The adapter of ``module``, or None where it is no linear that we know.

    A subclass counts as its base only while it keeps the base's forward and holds nothing but a weight and a bias.
    """
    bases: tuple[Any, ...] = type(module).__mro__
    for base in bases:
        for adapter in ADAPTERS:
            if f"{base.__module__}.{base.__qualname__}" == adapter.type_name:
                keeps_forward = type(module).forward is base.forward and "forward" not in vars(module)
                plain = set(module._parameters) <= {"weight", "bias"} and not module._modules and not module._buffers
                dense = isinstance(module._parameters.get("weight"), nn.Parameter)
                return adapter if keeps_forward and plain and dense else None
    return None


def feature_changes(
    model: nn.Module, columns: Sequence[Column], rows: Iterable[str], rank: int
) -> list[AttributeChange]:
    """The numbers of features that the linears of a region have on ``rank``."""
    changes, size = [], len(columns[0].rows)
    for column in columns:
        adapter = linear_adapter(model.get_submodule(column.module))
        if adapter is not None:
            changes.append(AttributeChange(column.module, adapter.output_attribute, len(column.row_indices(rank))))
    for name in rows:
        module = model.get_submodule(name)
        adapter = linear_adapter(module)
        if adapter is not None and adapter.input_attribute in vars(module):
            features = vars(module)[adapter.input_attribute]
            changes.append(AttributeChange(name, adapter.input_attribute, features // size))
    return changes


def weight_operand(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The ``(input, weight)`` of a call that multiplies by a weight as the known linears do, else None."""
    if function is F.linear:
        operands = (*args, *(kwargs[name] for name in ("input", "weight") if name in kwargs))
        return (operands[0], operands[1]) if len(operands) > 1 else None
    if function is torch.addmm:
        operands = (*args, *(kwargs[name] for name in ("input", "mat1", "mat2") if name in kwargs))
        return (operands[1], operands[2]) if len(operands) > 2 else None
    return None
