"""The command line that runs the current script, and under Hydra the current job, once more."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from omegaconf import OmegaConf

from lightning_tp.errors import ParallelConfigError

# A child does not sweep, and it gets the parent's directories as they were resolved there.
_PARENT_ONLY = {
    "hydra.mode",
    "hydra.run.dir",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "hydra.output_subdir",
    "hydra.job.num",
    "hydra.job.id",
}


def child_command() -> tuple[list[str], str | None]:
    """The command of a child rank, and the directory to start it in (None: this process's).

    Raises:
        ParallelConfigError: this process was not started from a script or a module.
    """
    if not HydraConfig.initialized():
        return [*_program(os.getcwd()), *sys.argv[1:]], None
    config = HydraConfig.get()
    return [*_program(config.runtime.cwd), *hydra_arguments(config, sys.argv[1:])], config.runtime.cwd


def hydra_arguments(config: HydraConf, arguments: list[str]) -> list[str]:
    """The arguments with which a Hydra app runs one job alone.

    Args:
        config: the ``hydra`` node of the job that runs now; in a sweep it holds this job's overrides.
        arguments: what the user typed. Which config is meant is taken from here, the overrides are not.
    """
    typed, _ = get_args_parser().parse_known_args(arguments)
    flags = {"--config-path": typed.config_path, "--config-name": typed.config_name, "--config-dir": typed.config_dir}
    command = [part for flag, value in flags.items() if value is not None for part in (flag, value)]
    command += [item for item in config.overrides.hydra if _key(item) not in _PARENT_ONLY]
    command += list(config.overrides.task)
    # An output_subdir would have every rank write the same config.yaml.
    command += ["hydra.mode=RUN", f"hydra.run.dir={_quoted(config.runtime.output_dir)}", "hydra.output_subdir=null"]
    if config.mode == RunMode.MULTIRUN:
        # What a config may refer to: the number of the job, and directories with the time in their name.
        command += [
            f"hydra.sweep.dir={_quoted(config.sweep.dir)}",
            f"hydra.sweep.subdir={_quoted(config.sweep.subdir)}",
        ]
        if not OmegaConf.is_missing(config.job, "num"):
            command.append(f"hydra.job.num={config.job.num}")
        if not OmegaConf.is_missing(config.job, "id"):
            command.append(f"hydra.job.id={_quoted(str(config.job.id))}")
    return command


def _program(directory: str) -> list[str]:
    """How Python was started: ``directory`` is where the script's path, if relative, starts."""
    import __main__

    if (spec := getattr(__main__, "__spec__", None)) is not None:
        return [sys.executable, "-m", spec.name]
    script = Path(directory, sys.argv[0])
    if not script.is_file():
        raise ParallelConfigError(
            f"The other ranks are started by running the script again, but this process was not started from a script "
            f"(sys.argv[0] is {sys.argv[0]!r}). Put the code into a file and run it, or start the ranks with torchrun."
        )
    return [sys.executable, str(script)]


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def _quoted(text: str) -> str:
    """``text`` as one value of Hydra's override grammar, whatever characters it has."""
    return QuotedString(text.replace("${", "\\${"), Quote.single).with_quotes()
