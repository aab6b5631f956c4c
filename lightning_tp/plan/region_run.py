"""One run of a region while its split is proven: unsplit, or as one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_tp.dropout import without_dropout
from lightning_tp.plan.compare import NotProven
from lightning_tp.plan.linears import TRANSPOSES, SplittableLinear, added_bias, weight_operand
from lightning_tp.plan.norms import Norm
from lightning_tp.plan.sharding_plan import Entry, SizeRule
from lightning_tp.plan.sizes import SIZED_FUNCTIONS, apply_rule, derive_rule, names_sizes, output_shape
from lightning_tp.plan.thin import ThinWeight

_CALL = " call "


class RegionRun(TorchFunctionMode):
    """Cuts what enters the region, collects the rows' outputs, and rescales sizes if it is given the unsplit calls.

    Args:
        thin: By id of the parameters that stand for them: the weights that are only multiplied by.
        columns: By id of their weights.
        rows: By id of their weights.
        entries: By id of their weights.
        full_outputs: For one rank: the rows' outputs in the unsplit run, which stand for the reduced ones.
        full_calls: For one rank: the unsplit run's calls that name sizes, if sizes are to be rescaled.
        full_statistics: For one rank: the sums of the normalisations in the unsplit run.
    """

    def __init__(
        self,
        thin: Mapping[int, ThinWeight],
        columns: Mapping[int, SplittableLinear],
        rows: Mapping[int, SplittableLinear],
        entries: Mapping[int, Entry],
        full_outputs: Mapping[str, Tensor] | None,
        full_calls: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]] | None,
        full_statistics: Mapping[int, Tensor] | None,
    ) -> None:
        super().__init__()
        self.thin, self.columns, self.rows, self.entries = thin, columns, rows, entries
        self.full_outputs, self.full_calls, self.full_statistics = full_outputs, full_calls, full_statistics
        self.inputs: dict[int, tuple[Tensor, Tensor]] = {}
        self.entered: list[Tensor] = []
        self.row_inputs: list[Tensor] = []
        self.outputs: dict[str, Tensor] = {}
        self.with_bias: dict[str, Tensor] = {}
        self.calls: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.rules: list[SizeRule] = []
        self.recomputes = False
        self.norm_calls = 0
        self.statistics: dict[int, tuple[Tensor, Tensor]] = {}
        self.local_norms: set[str] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs, _ = without_dropout(function, args, kwargs or {})
        if kwargs.get("out") is not None:
            with torch.no_grad():  # such a call has no gradient
                return function(*args, **kwargs)
        with torch.enable_grad():
            if names_sizes(function, args):
                return self._sized(function, args, kwargs)
            operands = weight_operand(function, args, kwargs)
            weight = id(operands[1]) if operands is not None else 0
            if operands is None or weight not in self.thin or self.thin[weight].output_dim != operands[2]:
                self._refuse_thin(function, (*args, *kwargs.values()))
                return function(*args, **kwargs)
            x = operands[0]
            y = self.thin[weight].product(self._entering(x) if weight in self.columns else x)
            result = added_bias(function, args, kwargs, y)
            if weight in self.rows:
                result = self._reduced(self.rows[weight].name, x, y, result)
            return self._entry(result, self.entries[weight]) if weight in self.entries else result

    def _refuse_thin(self, function: Any, values: tuple[Any, ...]) -> None:
        """A thin weight has no values but in products."""
        plain = getattr(function, "__name__", "") == "__get__" or function in TRANSPOSES
        if not plain and any(id(value) in self.thin or id(getattr(value, "_base", None)) in self.thin
                             for value in values if isinstance(value, Tensor)):  # fmt: skip
            raise NotProven("its code does more with a weight than multiply by it")

    @contextmanager
    def normalising(self, model: nn.Module, norms: Mapping[str, Norm]) -> Iterator[None]:
        """Let ``norms`` add their sums over the ranks where their features are split."""
        modules = {name: model.get_submodule(name) for name in norms}
        try:
            for name, module in modules.items():
                vars(module)["forward"] = lambda x, name=name, module=module: self._normalised(name, module, x, norms)
            yield
        finally:
            for module in modules.values():
                vars(module).pop("forward", None)

    def _normalised(self, name: str, module: nn.Module, x: Tensor, norms: Mapping[str, Norm]) -> Any:
        norm, position = norms[name], self.norm_calls
        self.norm_calls += 1
        if self.full_statistics is None or x.shape[-1] == norm.features:
            if self.full_statistics is None:
                self.statistics[position] = (norm.statistic(x), x)
            return type(module).forward(module, x)
        leaf = self.full_statistics[position].clone().requires_grad_(True)
        self.statistics[position] = (norm.statistic(x), leaf)
        self.local_norms.add(name)
        weight: Any = module._parameters["weight"]
        return norm.apply(x, leaf, weight, module._parameters.get("bias"))

    def _sized(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(self.outputs) >= len(self.rows):
            return function(*args, **kwargs)  # behind the region nothing is split
        if self.full_calls is None:
            result = function(*args, **kwargs)
            self.calls.append((SIZED_FUNCTIONS[function], tuple(args[0].shape), output_shape(result)))
            return result
        if len(self.rules) >= len(self.full_calls):
            return function(*args, **kwargs)
        name, full_input, full_output = self.full_calls[len(self.rules)]
        if name != SIZED_FUNCTIONS[function]:
            raise NotProven("its code takes another path on one rank's share")
        self.rules.append(derive_rule(function, full_input, full_output, args[0].shape))
        return apply_rule(function, args, kwargs, self.rules[-1])

    def _entering(self, x: Tensor) -> Tensor:
        """The leaf that stands for ``x`` inside the region."""
        if id(x) not in self.inputs:
            self.inputs[id(x)] = (x, x.detach().requires_grad_(True))
        return self.inputs[id(x)][1]

    def _reduced(self, row: str, x: Tensor, product: Tensor, result: Tensor) -> Tensor:
        """What stands for the output of ``row`` behind it: that of the unsplit run."""
        calls = sum(key.partition(_CALL)[0] == row for key in self.outputs)
        row = f"{row}{_CALL}{calls}" if calls else row  # a loop
        if self.full_outputs is not None and row not in self.full_outputs:
            raise NotProven("its code takes another path on one rank's share")
        self.row_inputs.append(x)
        self.outputs[row] = product
        if self.full_outputs is not None:
            return self.full_outputs[row]
        self.with_bias[row] = result.detach()
        return self.with_bias[row]

    def _entry(self, y: Tensor, entry: Entry) -> Tensor:
        """``y`` with the features that enter the region cut off from their linear."""
        rows = torch.tensor(entry.row_indices(0), device=y.device)
        leaf = y.detach().index_select(-1, rows).requires_grad_(True)
        self.entered.append(leaf)
        return y.index_copy(-1, rows, leaf)
