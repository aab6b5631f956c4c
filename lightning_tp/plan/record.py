"""What a run has computed, operation by operation, so that repeated blocks are recognised and looked at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef


@dataclass(frozen=True)
class _Value:
    """A tensor of the run, by its number."""

    number: int


class Record:
    """The operations of a run, in their order. Tensors have numbers, in the order in which they were met."""

    def __init__(self) -> None:
        self._operations: list[tuple[Any, Any, tuple[int, ...]]] = []
        self._numbers: dict[int, int] = {}  # by id, which may be given to another tensor when one is freed
        self._tensors: list[_Known] = []

    def __len__(self) -> int:
        return len(self._operations)

    def add(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note a call of ``function``."""
        operands = self.described((args, kwargs))
        results = result if isinstance(result, (tuple, list)) else (result,)
        numbers = tuple(self._number(entry) for entry in results if isinstance(entry, Tensor))
        self._operations.append((function, operands, numbers))

    def described(self, value: Any) -> Any:
        """``value`` with tensors as numbers, and everything hashable."""
        if isinstance(value, Tensor):
            return _Value(self._number(value))
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, *map(self.described, value))
        if isinstance(value, Mapping):
            return ("dict", *((key, self.described(entry)) for key, entry in value.items()))
        if isinstance(value, slice):
            return ("slice", *map(self.described, (value.start, value.stop, value.step)))
        if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device)):
            return (type(value).__name__, value)
        return type(value)

    def computation(self, part: range, given: Any, names: Mapping[int, str]) -> Any:
        """What the operations ``part`` compute from ``given`` (as :meth:`described`), as a hashable value.

        Two parts of a run for which it is the same call the same functions with the same numbers on tensors of the
        same shapes that come from the same places. ``names`` gives parameters a name, by id.
        """
        local: dict[int, int] = {}

        def placed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(placed, value))
            if not isinstance(value, _Value):
                return value
            if value.number in local:
                return ("value", local[value.number])
            local[value.number] = len(local)
            known = self._tensors[value.number]
            return ("new", known.described, names.get(known.id))

        found: list[Any] = [placed(given)]
        for function, operands, results in self._operations[part.start : part.stop]:
            found.append((function, placed(operands), tuple(self._tensors[number].described for number in results)))
            for number in results:
                local.setdefault(number, len(local))
        return tuple(found)

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None or self._tensors[number].reference() is not tensor:
            number = self._numbers[id(tensor)] = len(self._tensors)
            self._tensors.append(_Known(tensor))
        return number


class _Known:
    """What is kept of a tensor that was met; the tensor itself is not kept alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.id = id(tensor)
        self.reference = TensorWeakRef(tensor)
        self.described = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)
