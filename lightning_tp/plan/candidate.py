"""What the probe finds: parts of the computation that may become regions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_tp.plan.linears import SplittableLinear
from lightning_tp.plan.sharding_plan import Column, Entry, SplitParameter
from lightning_tp.plan.trace import ModuleCall, Run

USED_ELSEWHERE = "its weight is also used elsewhere than in its own forward"
USED_BY_HAND = "its weight is used without calling the module"


@dataclass(frozen=True)
class Fit:
    """Linears that are split together, and the tensor-parallel sizes up to 64 that can split them."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    legal_sizes: tuple[int, ...]

    def reason(self, size: int) -> str:
        return f"{size} ranks do not fit; legal sizes: {', '.join(map(str, self.legal_sizes))}"

    @property
    def members(self) -> set[str]:
        return {*self.columns, *self.rows}


@dataclass(frozen=True)
class Candidate:
    """A part of the computation that may become a region.

    Attributes:
        columns: The column-parallel linears with the rows of each rank.
        rows: Names of the row-parallel linears.
        inputs: Names of the columns grouped by the input tensor that they share; a column that is called several times
            stands in several groups.
        call: The innermost module call that holds all of it; None where that is the whole run.
        stack: All module calls that hold all of it, outermost first.
        partial: Parameters that are read between columns and rows, and needed whole by every rank.
        shards: Parameters that are read there, of which each rank needs its part.
        entries: Linears outside of it whose outputs enter it past its columns.
        norms: Normalisations over all features between columns and rows.
        random: Whether a dropout lies between columns and rows.
        legal_sizes: The sizes up to 64 that split it without cutting a head.
    """

    columns: tuple[Column, ...]
    rows: tuple[str, ...]
    inputs: tuple[tuple[str, ...], ...]
    stack: tuple[ModuleCall, ...]
    partial: tuple[str, ...]
    shards: tuple[SplitParameter, ...]
    entries: tuple[Entry, ...]
    norms: tuple[str, ...]
    random: bool
    legal_sizes: Callable[[], tuple[int, ...]] = field(compare=False)

    @property
    def call(self) -> ModuleCall | None:
        return self.stack[-1] if self.stack else None

    @property
    def members(self) -> set[str]:
        return {column.module for column in self.columns} | set(self.rows)

    @property
    def saved(self) -> int:
        """Output features of the columns that one rank need not compute."""
        return sum(
            len(set().union(*map(column.row_indices, range(len(column.rows))))) - len(column.row_indices(0))
            for column in self.columns
        )

    @property
    def is_complete(self) -> bool:
        """Whether no rank computes what another computes too."""
        return not self.entries and all(column.is_sharded for column in self.columns)

    def matches(self, other: Candidate) -> bool:
        """Whether both are the same linears in the same roles, found at two calls."""
        keys = ("columns", "rows", "inputs", "shards", "entries", "norms", "partial")
        return all(getattr(self, key) == getattr(other, key) for key in keys)


@dataclass
class Probe:
    """What the probe has found.

    Attributes:
        linears: All linears that an adapter knows, by name.
        candidates: What may become a region.
        misfits: What other sizes can split, but not the one asked for.
        reasons: For each linear that is in no candidate: why.
        run: The traced run.
        finals: The linears whose output no other linear is computed from, unless their weight is used elsewhere.
        readers: For each parameter the innermost modules whose code reads it.
    """

    linears: dict[str, SplittableLinear]
    candidates: list[Candidate]
    misfits: list[Fit]
    reasons: dict[str, str]
    run: Run
    finals: list[str] = field(default_factory=list)
    readers: dict[str, set[str]] = field(default_factory=dict)

    def by_hand(self, linear: str) -> bool:
        """Whether code uses a linear's weight past the linear's own forward, and nothing else keeps it whole."""
        return self.reasons.get(linear) in (USED_ELSEWHERE, USED_BY_HAND)

    def order(self, module: str) -> int:
        """The place of a module in the order of the run."""
        return next((i for i, name in enumerate(self.run.module_calls) if name == module), -1)
