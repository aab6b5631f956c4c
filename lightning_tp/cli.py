"""The command `lightning-tp`."""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version

from lightning_tp import verify
from lightning_tp.errors import CommandError
from lightning_tp.inspection import command as inspection


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `lightning-tp` with these arguments, by default those of the command line, and return its exit status.

    Bad usage exits with status 2, as does a command that could not do its work; an interrupt gives 130.
    """
    parser = argparse.ArgumentParser(prog="lightning-tp", description="Tensor-parallel training for PyTorch Lightning.")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command")
    inspect_parser = commands.add_parser(
        "inspect",
        help="show how a model would be split, and why",
        description="Plan a model without devices and processes, and show what is split, what stays whole, and why. "
        "Exit status: 0 done, 2 bad usage, or a model that cannot be planned.",
    )
    inspection.add_arguments(inspect_parser)
    inspect_parser.set_defaults(run=inspection.run)
    verify_parser = commands.add_parser(
        "verify",
        help="compare training on one device with training under the strategy",
        description="Train some steps on one device and under the strategy of a Hydra config, and compare losses "
        "and gradient norms. Exit status: 0 they agree, 1 they differ, 2 the comparison could not be made.",
    )
    verify.add_arguments(verify_parser)
    verify_parser.set_defaults(run=verify.verify)
    # argparse takes only one run of positional arguments; overrides may stand between options too.
    parsed, rest = parser.parse_known_args(arguments)
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        parser.error(f"unknown option {unknown[0]}; `lightning-tp {parsed.command} --help` lists the options")
    if parsed.version:
        print(f"lightning-tp {version('lightning-tp')}")
        return 0
    if parsed.command is None:
        parser.error("a command is needed; `lightning-tp --help` lists them")
    # Termination unwinds like Ctrl-C, so that a command can end the processes it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return parsed.run(parsed, [*parsed.overrides, *rest])
    except CommandError as error:
        print(f"lightning-tp {parsed.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception:
        # Python's own status for an uncaught error is 1, which here would read as "the runs differ".
        traceback.print_exc()
        return 2


if __name__ == "__main__":
    sys.exit(main())
