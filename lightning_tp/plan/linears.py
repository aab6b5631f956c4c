"""The linear modules that can be split: one adapter for each type."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
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

    A subclass counts as its base only while it holds nothing but a weight and a bias, and keeps the base's forward or
    one that gives the same numbers.
    """
    bases: tuple[Any, ...] = type(module).__mro__
    for base in bases:
        for adapter in ADAPTERS:
            if f"{base.__module__}.{base.__qualname__}" == adapter.type_name:
                plain = set(module._parameters) <= {"weight", "bias"} and not module._modules and not module._buffers
                weight = module._parameters.get("weight")
                dense = isinstance(weight, nn.Parameter) and not weight.is_complex() and "forward" not in vars(module)
                kept = type(module).forward is base.forward or _computes_the_same(module, adapter)
                return adapter if plain and dense and kept else None
    return None


@functools.cache
def _forward_is_linear(forward: Any, adapter: LinearAdapter) -> bool:
    """Whether a class's own forward gives ``x W + b``, tried on a small module that has only what it may read."""
    for with_bias in (True, False):
        weight = torch.randn(3, 5, dtype=torch.float64)
        bias = torch.randn(weight.shape[adapter.output_dim], dtype=torch.float64) if with_bias else None
        x = torch.randn(2, weight.shape[adapter.input_dim], dtype=torch.float64)
        small = SimpleNamespace(weight=weight, bias=bias, training=True)
        try:
            y = forward(small, x)
        except Exception:  # it reads more than a linear has
            return False
        expected = adapter.product(x, weight) if bias is None else adapter.product(x, weight) + bias
        if not isinstance(y, Tensor) or y.shape != expected.shape or not torch.allclose(y, expected, rtol=1e-12):
            return False
    return True


def _computes_the_same(module: nn.Module, adapter: LinearAdapter) -> bool:
    with torch.random.fork_rng(devices=()):
        return _forward_is_linear(type(module).forward, adapter)


@dataclass(frozen=True)
class SplittableLinear:
    """A linear of the model that an adapter knows."""

    name: str
    module: nn.Module
    adapter: LinearAdapter

    @property
    def weight(self) -> nn.Parameter:
        return self.module._parameters["weight"]  # type: ignore[return-value]

    @property
    def output_features(self) -> int:
        return self.weight.shape[self.adapter.output_dim]

    @property
    def input_features(self) -> int:
        return self.weight.shape[self.adapter.input_dim]

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.module._parameters.values() if p is not None)


def splittable_linears(model: nn.Module) -> dict[str, SplittableLinear]:
    """The linears of ``model`` that an adapter knows, by module name."""
    found = {}
    for name, module in model.named_modules():
        adapter = linear_adapter(module)
        if adapter is not None:
            found[name] = SplittableLinear(name, module, adapter)
    return found


def other_linears(model: nn.Module) -> dict[str, str]:
    """Modules that have the features of a linear but are none that an adapter knows, nor around one: and why not."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        features = [getattr(module, key, None) for key in ("in_features", "out_features")]
        if all(isinstance(size, int) for size in features) and not any(map(linear_adapter, module.modules())):
            own = isinstance(module._parameters.get("weight"), nn.Parameter)
            found[name] = (
                "it computes something else than a linear does"
                if own
                else "its weight is no parameter, but made of others (weight norm, pruning, quantization)"
            )
    return found


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


PRODUCTS = {
    F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm, torch.bmm,
    Tensor.bmm, torch.einsum, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, F.bilinear, F.grouped_mm,
    torch._grouped_mm, F.multi_head_attention_forward,
}  # fmt: skip
"""Functions that multiply matrices."""

TRANSPOSES = {Tensor.t, torch.t, Tensor.transpose, torch.transpose}
"""Functions that give a weight's transposed view."""

_MATMULS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}


def weight_operand(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, int] | None:
    """Input, weight and the weight's output dim of a call that multiplies by a weight as linears do, else None.

    A product with a parameter's transposed view counts as one with the parameter.
    """
    if function is F.linear:
        operands = (*args, *(kwargs[name] for name in ("input", "weight") if name in kwargs))
        return (operands[0], operands[1], 0) if len(operands) > 1 else None
    if function is torch.addmm and not kwargs.keys() & {"alpha", "beta", "out"}:
        operands = (*args, *(kwargs[name] for name in ("input", "mat1", "mat2") if name in kwargs))
        return (operands[1], operands[2], 1) if len(operands) > 2 else None
    if function in _MATMULS and len(args) == 2 and isinstance(args[1], Tensor):
        base = args[1]._base
        if isinstance(base, nn.Parameter) and base.dim() == 2 and args[1].shape == base.shape[::-1]:
            return (args[0], base, 0) if args[1].stride() == base.stride()[::-1] else None
    return None


def added_bias(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], product: Tensor) -> Tensor:
    """The result of a call that :func:`weight_operand` knows, from its product."""
    position = {F.linear: 2, torch.addmm: 0}.get(function, len(args))
    bias = args[position] if position < len(args) else kwargs.get("input" if function is torch.addmm else "bias")
    return product if bias is None else product + bias
