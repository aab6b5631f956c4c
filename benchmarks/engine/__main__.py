"""Time the engine against everything that could be used in its place, and write the tables.

python -m benchmarks.engine [--hidden 128 512 1024] [--repeats 30 8 4] [--only NAME ...] [--output FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.engine import PEERS
from benchmarks.engine.one_process import OneProcess
from benchmarks.engine.report import figures, found, lines, markdown
from benchmarks.engine.run import Result, measure
from benchmarks.engine.setting import Setting
from lightning_tp.testing import RankPool

RANKS = 2
_HOUR = 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 512, 1024], help="hidden sizes")
    parser.add_argument(
        "--repeats", type=int, nargs="+", default=[30, 8, 4], help="rounds: one for all sizes, or one each"
    )
    parser.add_argument("--batch", type=int, default=4, help="samples of a step")
    parser.add_argument("--sequence", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="these implementations; by default all")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the Markdown file to write")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures for programs")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.only if name not in PEERS]
    if unknown:
        parser.error(f"unknown implementation {unknown[0]!r}; there are: {'; '.join(PEERS)}")
    settings = [Setting(size, arguments.batch, arguments.sequence) for size in arguments.hidden]
    for setting in settings:
        if setting.hidden_size % (RANKS * setting.head_size):
            parser.error(f"--hidden {setting.hidden_size} is no multiple of {RANKS * setting.head_size}")
    if arguments.batch % RANKS:
        parser.error(f"--batch {arguments.batch} is no multiple of the {RANKS} ranks")
    if len(arguments.repeats) not in (1, len(settings)):
        parser.error(
            f"--repeats has {len(arguments.repeats)} numbers for {len(settings)} hidden sizes; give one, or one each"
        )
    repeats = arguments.repeats * (len(settings) if len(arguments.repeats) == 1 else 1)
    names = [name for name in PEERS if not arguments.only or name in (*arguments.only, OneProcess.name)]

    os.environ |= {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    pool = RankPool(RANKS, collective_timeout=_HOUR)
    results: dict[int, list[Result]] = {}
    try:
        for setting, rounds in zip(settings, repeats, strict=True):
            results[setting.hidden_size] = pool.run(measure, setting, names, rounds, timeout=_HOUR)[0]
            print(
                f"hidden size {setting.hidden_size}",
                *lines(setting, results[setting.hidden_size]),
                "",
                sep="\n",
                flush=True,
            )
    finally:
        pool.close()
    if arguments.output:
        arguments.output.write_text(markdown(settings, results, RANKS))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures(settings, results, RANKS), indent=1) + "\n")
    for outcome in found(results):
        target = outcome.target
        print(
            f"hidden size {target.hidden_size}: {outcome.ratio:.3f} x {target.to}, at most {target.limit:.2f}: "
            f"{'holds' if outcome.holds else 'DOES NOT HOLD'}"
        )
    failed = [
        f"{r.peer}: {r.failure}"
        for entries in results.values()
        for r in entries
        if r.failure and PEERS[r.peer].required
    ]
    print(*failed, sep="\n", end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
