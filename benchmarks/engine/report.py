"""The tables of the benchmark in Markdown, and its figures as plain containers."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.engine import PEERS
from benchmarks.engine.one_process import OneProcess
from benchmarks.engine.run import CHECKED_STEPS, PROFILED_STEPS, TOLERANCE, Result
from benchmarks.engine.setting import Setting
from benchmarks.engine.targets import Outcome, outcomes
from benchmarks.engine.time_spent import KINDS
from benchmarks.engine.usage import Count

MIB = 2**20

_TEXT = """# Benchmarks

Written by `make bench` (`python -m benchmarks.engine --output docs/benchmarks.md --json docs/benchmarks.json`); do not
edit.

The Llama-style model of `recipes/llama.py` ({layers} layers, heads of {head_size} features, as many key heads as query
heads, {words} words) is trained on {batch} samples of {sequence} tokens, on {ranks} processes of one machine (gloo, one
thread each), in {dtype}, with fused AdamW. Machine: {machine}.

- **Same numbers first.** Every implementation starts from the same values. Its losses in {checked} steps and the norm
  of all gradients must equal those of one process to {tolerance:.0e}; the largest relative difference is in the table.
- **Step**: forward, backward and optimizer step; the fastest of {repeats} on the slowest rank. All implementations live
  in the same processes and take their steps in turns, one after the other in every round, so that what disturbs the
  machine disturbs all of them. Quote the ratios; the seconds are this machine's.
- **To one process**: step time over that of the unsplit model on one process with one thread; {floor:.1f} would be
  ideal. **To the same whole**: over that of the same code unsplit (compiled: compiled; transformers: its own model).
- **Memory of a rank**: bytes of tensors, for the rank that has most. Held: parameters, buffers and optimizer state.
  Peak: the most at one time in a step, from the profiler's record of allocations.
- **Collectives of a step** on one rank, and their bytes: the larger of what goes in and what comes out.
- **Where a step goes**: rank zero's time in the fastest of {profiled} profiled steps, in ms. Collectives: a collective
  is on its way and nothing is computed; waiting for a slower rank is in it. Between operations: Python, autograd and
  dispatch, which the profile makes longer.

{notes}
{tables}
## Targets

{targets}
"""


def markdown(settings: list[Setting], results: dict[int, list[Result]], ranks: int) -> str:
    """The whole page; ``results`` by hidden size."""
    first = settings[0]
    repeats = sorted({len(result.seconds) for entries in results.values() for result in entries if result.seconds})
    return _TEXT.format(
        layers=first.layers,
        head_size=first.head_size,
        words=first.words,
        batch=first.batch,
        sequence=first.sequence,
        ranks=ranks,
        dtype=str(first.dtype).removeprefix("torch."),
        machine=machine(),
        checked=CHECKED_STEPS,
        profiled=PROFILED_STEPS,
        tolerance=TOLERANCE[first.dtype],
        repeats=" to ".join(str(number) for number in dict.fromkeys((repeats[0], repeats[-1]))),
        floor=1 / ranks,
        notes="\n".join(f"- *{result.peer}*: {PEERS[result.peer].note}." for result in results[first.hidden_size]),
        tables="".join(_section(setting, results[setting.hidden_size]) for setting in settings),
        targets="\n".join(["| step time of lightning_tp over that of | hidden size | at most | is | holds |",
                           "|---|---:|---:|---:|---|", *map(_target, found(results))]),
    )  # fmt: skip


def found(results: dict[int, list[Result]]) -> list[Outcome]:
    """The targets that these results decide."""
    return outcomes({size: _fastest(entries) for size, entries in results.items()})


def machine() -> str:
    """Processor, torch and Python of this machine."""
    with open("/proc/cpuinfo") as file:
        models = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return f"{len(models)} cores of {models[0]}, torch {torch.__version__}, Python {platform.python_version()}"


def lines(setting: Setting, results: list[Result]) -> list[str]:
    """The table of one setting."""
    head = ["implementation", "step, ms", "tokens/s", "to one process", "to the same whole", "held, MiB", "peak, MiB",
            "collectives", "difference"]  # fmt: skip
    times = _fastest(results)
    return [f"| {' | '.join(head)} |", f"|---|{'---:|' * 6}---|---:|", *(_row(setting, r, times) for r in results)]


def _section(setting: Setting, results: list[Result]) -> str:
    return "\n".join(
        [
            f"\n## Hidden size {setting.hidden_size}\n",
            *lines(setting, results),
            "\nWhere a step goes:\n",
            *_spent(results),
            "",
        ]
    )


def _spent(results: list[Result]) -> list[str]:
    """Milliseconds by kind of operation, for all that is not compiled: fused kernels are of no one kind."""
    eager = [result for result in results if result.usage and "compiled" not in result.peer]
    rows = [
        f"| {result.peer} | {' | '.join(f'{seconds * 1e3:.1f}' for seconds in result.usage[0].seconds.values())} |"
        for result in eager
    ]
    return [f"| implementation | {' | '.join(KINDS)} |", f"|---|{'---:|' * len(KINDS)}", *rows]


def _fastest(results: list[Result]) -> dict[str, float]:
    return {result.peer: min(result.seconds) for result in results if result.seconds}


def _row(setting: Setting, result: Result, times: dict[str, float]) -> str:
    if result.failure:
        return f"| {result.peer} | {result.failure.replace('|', '/')} |{' |' * 7}"
    seconds, usage = times[result.peer], result.usage
    most = max(usage, key=lambda one: one.peak_bytes)
    cells = [
        result.peer,
        f"{seconds * 1e3:.1f}",
        f"{setting.tokens_per_step / seconds:,.0f}",
        _ratio(seconds, times.get(OneProcess.name)),
        _ratio(seconds, times.get(PEERS[result.peer].whole)),
        f"{most.held_bytes / MIB:.1f}",
        f"{most.peak_bytes / MIB:.1f}",
        ", ".join(_count(kind, count) for kind, count in sorted(most.collectives.items())) or "none",
        f"{result.difference:.0e}",
    ]
    return f"| {' | '.join(cells)} |"


def _ratio(seconds: float, to: float | None) -> str:
    return "-" if to is None else f"{seconds / to:.3f}"


def _count(kind: str, count: Count) -> str:
    return f"{count.calls} {kind} ({count.bytes / MIB:.1f} MiB)"


def _target(outcome: Outcome) -> str:
    target = outcome.target
    verdict = "yes" if outcome.holds else "**no**"
    return f"| {target.to} | {target.hidden_size} | {target.limit:.2f} | {outcome.ratio:.3f} | {verdict} |"


def figures(settings: list[Setting], results: dict[int, list[Result]], ranks: int) -> dict[str, Any]:
    """All that was measured, for programs."""
    return {
        "machine": machine(),
        "ranks": ranks,
        "settings": [
            {"setting": asdict(setting), "results": [asdict(result) for result in results[setting.hidden_size]]}
            for setting in settings
        ],
        "targets": [asdict(o.target) | {"ratio": o.ratio, "holds": o.holds} for o in found(results)],
    }
