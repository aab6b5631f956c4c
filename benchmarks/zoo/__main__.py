"""Plan, prove and train every architecture of the zoo on ranks, and write the table of it.

python -m benchmarks.zoo [--only NAME ...] [--fast] [--output docs/models.md] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks.zoo import ARCHITECTURES
from benchmarks.zoo.report import figures, line, markdown, summary
from benchmarks.zoo.run import Row, quiet, run
from lightning_tp.testing import RankPool

SIZES = (2, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="these architectures; by default all")
    parser.add_argument("--fast", action="store_true", help="one architecture for each mechanism, as in the tests")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the Markdown file to write")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures for programs")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.only if name not in ARCHITECTURES]
    if unknown:
        parser.error(f"unknown architecture {unknown[0]!r}; there are: {'; '.join(ARCHITECTURES)}")
    chosen = [
        architecture
        for architecture in ARCHITECTURES.values()
        if (not arguments.only or architecture.name in arguments.only) and (architecture.fast or not arguments.fast)
    ]
    if not chosen:
        parser.error("--fast leaves none of the architectures of --only; leave one of the two out")

    quiet()
    torch.set_num_threads(1)
    pools = {size: RankPool(size) for size in SIZES}
    rows = []
    try:
        for pool in pools.values():
            pool.run(quiet)
        for architecture in chosen:
            row = Row(architecture)
            for size, pool in pools.items():
                row.outcomes[size] = run(architecture, size, pool)
            rows.append(row)
            print(line(row, SIZES), flush=True)
    finally:
        for pool in pools.values():
            pool.close()
    if arguments.output:
        arguments.output.write_text(markdown(rows, SIZES))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures(rows), indent=1) + "\n")
    print(summary(rows, SIZES))
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
