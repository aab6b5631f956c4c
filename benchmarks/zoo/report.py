"""The table of the zoo, in Markdown, and its figures as plain containers."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.zoo.run import TOLERANCE, Outcome, Row, Whole, loss_difference

_GOOD = 0.95

_TEXT = """# Models

Written by `make zoo` (`python -m benchmarks.zoo --output docs/models.md`); do not edit.

{summary}

Every architecture is a small configuration (2 layers, hidden size 64) with noise on its parameters, so that no bias is
zero and no gradient vanishes (but in DiT, where zeros are the point). It is planned with `unsplittable="replicate"` and
`vocabulary_parallel=True`, with a vocabulary that no size divides (131), and trained for 3 steps of AdamW on one device
and on gloo ranks.

- **Blocks split**: share of the elements of the weights in repeated blocks that is split. A repeated block is an entry
  of an `nn.ModuleList`, or one of several entries of one class in an `nn.Sequential`. Its weights are its parameters of
  at least two dims, but for those of embeddings, convolutions and norms. So attention, MLP, experts, routers and
  tables of biases count, and embeddings, output heads, poolers, classifiers and patches do not. A weight counts as
  split if each rank computes only its part, also where some ranks share rows (fewer key heads than ranks).
- **All matrices**: share of the parameters of everything the model multiplies by, with heads and classifiers.
- **Difference**: the largest relative difference between one device and any rank, of losses / of all gradients of all
  steps / of all parameters after the last. In float64, also where the model's code asks for float32; it must be below
  {tolerance64:.0e}. Marked f32: in float32, because the code has no float64; below {tolerance32:.0e}.
- **Seconds**: to find and prove the plan, in one process with one thread.

{table}

## What stays whole in the blocks, and why
{whole}"""


def markdown(rows: list[Row], sizes: tuple[int, ...]) -> str:
    return _TEXT.format(
        summary=summary(rows, sizes),
        tolerance64=TOLERANCE["64-true"],
        tolerance32=TOLERANCE["32-true"],
        table="\n".join([_header(sizes), *(line(row, sizes) for row in rows)]),
        whole="".join(_whole_section(row, sizes) for row in rows) or "\nNothing.\n",
    )


def summary(rows: list[Row], sizes: tuple[int, ...]) -> str:
    """How many architectures are split by how much, and which failed."""
    counts = [f"{sum((row.outcomes[size].block_share or 0.0) >= _GOOD for row in rows)} at tp={size}" for size in sizes]
    failed = [row.architecture.name for row in rows if row.failed]
    wrong = f"FAILED: {', '.join(failed)}." if failed else "No number is wrong in any of them."
    return (
        f"{len(rows)} architectures. At least {_GOOD:.0%} of the weights in their blocks are split in "
        f"{' and '.join(counts)}. {wrong}"
    )


def _header(sizes: tuple[int, ...]) -> str:
    titles = ["architecture", "what is special"]
    for title in ("blocks split", "all matrices", "regions", "difference", "seconds"):
        titles += [f"{title}, tp={size}" for size in sizes]
    return f"| {' | '.join(titles)} |\n|---|---|{'---:|' * (len(titles) - 2)}"


def line(row: Row, sizes: tuple[int, ...]) -> str:
    """The row of the table."""
    note = row.architecture.note + (" (f32)" if row.architecture.precision == "32-true" else "")
    cells = [row.architecture.name, note]
    for cell in (_blocks, _all, _regions, _difference, _seconds):
        cells += [cell(row.outcomes[size]) for size in sizes]
    return f"| {' | '.join(cells)} |"


def _blocks(outcome: Outcome) -> str:
    return "-" if outcome.block_share is None else f"{outcome.block_share:.1%}"


def _all(outcome: Outcome) -> str:
    return f"{outcome.plan.split_share:.1%}" if outcome.plan else "-"


def _regions(outcome: Outcome) -> str:
    return str(len(outcome.plan.regions)) if outcome.plan else "-"


def _difference(outcome: Outcome) -> str:
    if outcome.failure or outcome.comparison is None:
        return f"FAILED: {outcome.failure[:300].replace('|', '/')}"
    comparison = outcome.comparison
    sizes = (loss_difference(comparison), comparison.gradients.size, comparison.parameters.size)
    return " / ".join(f"{size:.0e}" for size in sizes)


def _seconds(outcome: Outcome) -> str:
    return f"{outcome.plan.found_in_seconds:.2f}" if outcome.plan else "-"


def _whole_section(row: Row, sizes: tuple[int, ...]) -> str:
    lines: dict[str, list[int]] = {}
    for size in sizes:
        for text in _grouped(row.outcomes[size].whole):
            lines.setdefault(text, []).append(size)
    if not lines:
        return ""
    points = [
        f"- {text}" + ("" if len(at) == len(sizes) else f" (tp={', '.join(map(str, at))} only)")
        for text, at in lines.items()
    ]
    return f"\n**{row.architecture.name}**\n\n" + "\n".join(points) + "\n"


def _grouped(whole: tuple[Whole, ...]) -> list[str]:
    """One line for each module and reason; modules that differ by their layer only are one."""
    elements: dict[tuple[str, str], int] = {}
    for entry in whole:
        key = _any_layer(entry.name), _distinct(_any_layer(re.sub(r" \(group: .*\)$", "", entry.reason)))
        elements[key] = elements.get(key, 0) + entry.elements
    return [f"`{name}` ({count:,} elements): {reason}" for (name, reason), count in elements.items()]


def _any_layer(text: str) -> str:
    return re.sub(r"\.\d+(?=[.,]|$)", ".*", text)


def _distinct(reason: str) -> str:
    """The reason with each name once: those of several layers have become the same."""
    return ", ".join(dict.fromkeys(reason.split(", ")))


def figures(rows: list[Row]) -> list[dict[str, Any]]:
    """What the table shows, for programs."""
    return [
        {
            "name": row.architecture.name,
            "note": row.architecture.note,
            "mechanism": row.architecture.mechanism,
            "precision": row.architecture.precision,
            "sizes": {str(size): _figures(outcome) for size, outcome in row.outcomes.items()},
        }
        for row in rows
    ]


def _figures(outcome: Outcome) -> dict[str, Any]:
    plan, comparison = outcome.plan, outcome.comparison
    return {
        "failure": outcome.failure,
        "block_share": outcome.block_share,
        "split_share": plan.split_share if plan else None,
        "regions": len(plan.regions) if plan else None,
        "planning_seconds": plan.found_in_seconds if plan else None,
        "differences": {
            "loss": loss_difference(comparison),
            "gradients": comparison.gradients.size,
            "parameters": comparison.parameters.size,
        }
        if comparison
        else None,
        "elements_not_compared": sum(comparison.zero_gradients.values()) if comparison else None,
        "parameters": comparison.total_parameters if comparison else None,
        "parameters_per_rank": list(comparison.parameters_per_rank) if comparison else None,
        "whole": [[entry.name, entry.elements, entry.reason] for entry in outcome.whole],
    }
