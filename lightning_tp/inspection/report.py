"""The report of `lightning-tp inspect`: tables for people, one JSON document for programs."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_tp.inspection.explain import Explanation
from lightning_tp.inspection.summary import FoldedRegions, FoldedWhole
from lightning_tp.inspection.tp_plan import Comparison
from lightning_tp.plan.sharding_plan import ShardingPlan

_PLAIN_WIDTH = 120
"""Columns of the report in a file or pipe, which has no width of its own."""
_NAMES_SHARE = 0.45
"""Of the width, at most, that a table's first column gets before it is wrapped."""
_NARROWEST = 14
"""Characters that each of the other columns keeps."""


@dataclass(frozen=True)
class Inspection:
    """Everything that the command has found out.

    ``explanations`` and ``comparison`` are None where they were not asked for.
    """

    model: nn.Module
    plan: ShardingPlan
    legal_sizes: list[int]
    regions: list[FoldedRegions]
    whole: list[FoldedWhole]
    explanations: list[Explanation] | None = None
    comparison: Comparison | None = None

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, numbers and strings."""
        document: dict[str, Any] = {
            "model": type(self.model).__name__,
            "parameters": self.parameters,
            "tensor_parallel_size": self.plan.tensor_parallel_size,
            "split_share": self.plan.split_share,
            "all_reduces_per_step": self.plan.all_reduces_per_step,
            "legal_sizes": self.legal_sizes,
            "regions": [asdict(entry) for entry in self.regions],
            "whole": [asdict(entry) for entry in self.whole],
            "plan": self.plan.to_dict(),
        }
        if self.explanations is not None:
            document["why"] = [asdict(entry) for entry in self.explanations]
        if self.comparison is not None:
            document["tp_plan"] = asdict(self.comparison)
        return document


def print_report(found: Inspection) -> None:
    """Print the tables to stdout; the explanations take their place where they were asked for."""
    # Names may hold brackets and colons, which are no markup here.
    console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False, width=_width())
    with console.capture() as captured:
        console.print(_head(found))
        if found.explanations is not None:
            for explanation in found.explanations:
                _print_explanation(console, explanation)
        else:
            _print_regions(console, found.regions)
            _print_whole(console, found.whole)
        if found.comparison is not None:
            _print_comparison(console, found.comparison)
    for line in captured.get().splitlines():
        print(line.rstrip())


def _width() -> int | None:
    """None leaves the width to the terminal; COLUMNS sets it elsewhere too."""
    return None if sys.stdout.isatty() else shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns


def _head(found: Inspection) -> str:
    plan = found.plan
    return (
        f"{type(found.model).__name__}: {found.parameters:,} parameters, on {plan.tensor_parallel_size} ranks. "
        f"{plan.split_share:.1%} of the parameters of linears are split, in {_counted(len(plan.regions), 'region')}, "
        f"with {_counted(plan.all_reduces_per_step, 'all-reduce')} a step. "
        f"Planned in {plan.found_in_seconds:.2f} s.\n"
        f"Legal tensor-parallel sizes: {', '.join(map(str, found.legal_sizes))}"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _table(console: Console, title: str, names: Sequence[str], *headings: str, right: Sequence[str] = ()) -> Table:
    """An empty table whose first column keeps ``names`` in one piece, as far as that leaves room for the others."""
    table = Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)
    room = console.width - _NARROWEST * (len(headings) - 1)
    longest = min(max(map(len, [*names, headings[0]])), int(console.width * _NAMES_SHARE), max(room, _NARROWEST))
    for number, heading in enumerate(headings):
        justify: Literal["left", "right"] = "right" if heading in right else "left"
        table.add_column(heading, justify=justify, overflow="fold", width=None if number else longest)
    return table


def _print_regions(console: Console, regions: list[FoldedRegions]) -> None:
    console.print()
    if not regions:
        console.print("Nothing is split.")
        return
    headings = ("region", "count", "columns", "rows", "local code", "proof error", "all-reduces")
    names = [entry.place for entry in regions]
    title = "Split (all-reduces: of one region, forward + backward)"
    table = _table(console, title, names, *headings, right=("count", "proof error", "all-reduces"))
    for entry in regions:
        table.add_row(
            entry.place,
            str(entry.count),
            ", ".join(entry.columns),
            ", ".join(entry.rows),
            entry.local_code,
            f"{entry.error:.0e}",
            f"{entry.forward} + {entry.backward}",
        )
    console.print(table)


def _print_whole(console: Console, whole: list[FoldedWhole]) -> None:
    console.print()
    names = [name for entry in whole for name in entry.names]
    headings = ("modules", "parameters", "share", "reason")
    table = _table(console, "Whole on every rank", names, *headings, right=("parameters", "share"))
    for entry in whole:
        # The members of a group are many, and --why has them.
        reason = re.sub(r" \(group: .*\)$", "", entry.reason)
        table.add_row("\n".join(entry.names), f"{entry.parameters:,}", f"{entry.share:.1%}", reason)
    console.print(table)


def _print_explanation(console: Console, explanation: Explanation) -> None:
    console.print()
    console.print(explanation.name)
    facts = Table.grid(padding=(0, 2, 0, 2))
    for heading, fact in explanation.facts.items():
        facts.add_row(heading, fact)
    console.print(facts)


def _print_comparison(console: Console, comparison: Comparison) -> None:
    console.print()
    if comparison.note:
        console.print(f"Compared with tp_plan: {comparison.note}")
        return
    names = [group.name for group in comparison.groups]
    title = "Compared with the tp_plan of transformers"
    table = _table(console, title, names, "parameters", "ours", "theirs", "verdict")
    for group in comparison.groups:
        verdict = group.verdict + (f": {group.how}" if group.how else "")
        table.add_row(group.name, group.ours or "-", group.theirs or "-", verdict)
    console.print(table)
    console.print(f"{_counted(comparison.whole, 'other parameter')} whole in both.")
