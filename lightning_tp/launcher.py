"""Starts the ranks of one host by running the script again, watches them, and cleans up after a job.

The rank environment (``LOCAL_RANK``, ...) is Lightning's. Under Hydra a child runs exactly the parent's current job,
also in a sweep: the same overrides, the same output directory.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lightning_tp.child_command import child_command
from lightning_tp.process import exit_with_parent, leave

_LAUNCHER_PID = "LIGHTNING_TP_LAUNCHER_PID"
_RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
# What the user had set before any launcher ran: Lightning's own launcher keeps no record of what it overwrites.
_AT_IMPORT = {name: os.environ.get(name) for name in _RANK_VARIABLES}

_JOB_END = 30.0  # seconds that the other ranks may take longer than rank zero at the end of a job
_FAILED_END = 5.0  # the same after a failure
_OWN_ERROR = 2.0  # seconds that rank zero gets to raise an error of its own before a child's exit status is news
_GRACE = 5.0  # seconds for the watchdog, which knows more than an exit status, to end the run


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts ``num_processes - 1`` children of this script, which is rank zero of its host.

    Differences to Lightning's launcher: children follow Hydra's current job, end when their parent ends, and are waited
    for when it ends; a child that fails is named on the screen and ends the run with exit status 1.
    """

    def __init__(self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._failed = threading.Event()  # set when rank zero's own error is under way: it will be shown
        self._collected = threading.Event()  # set when nobody needs to watch the children any more
        self._environment: dict[str, str | None] = {}
        self._threads = torch.get_num_threads()

    def launch(self, function: Callable, *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the children if this process is the one to do so, then return ``function(*args, **kwargs)``."""
        self._failed.clear()
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._environment = {name: os.environ.get(name) for name in _RANK_VARIABLES}
            self._threads = torch.get_num_threads()
            atexit.register(self._at_exit)
            self._call_children_scripts()
            threading.Thread(target=self._observe, name="lightning_tp-observer", daemon=True).start()
        elif parent := os.environ.pop(_LAUNCHER_PID, None):
            exit_with_parent(int(parent), f"local rank {self.cluster_environment.local_rank()}")
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except BaseException:
            self._failed.set()
            raise

    def kill(self, signum: int) -> None:
        """Send ``signum`` to every child that lives; after SIGKILL nobody asks how they ended."""
        if signum == signal.SIGKILL:
            self._collected.set()
        for process in self.procs:
            process.send_signal(signum)

    def collect(self) -> list[str]:
        """Wait for the children to end, kill those that do not, and say which ended badly.

        Empty after a failure of rank zero: the children's end is its consequence.
        """
        self._collected.set()
        failed = self._failed.is_set()
        endings = wait_for(self.procs, _FAILED_END if failed else _JOB_END)
        return [] if failed else endings

    def finish(self) -> list[str]:
        """`collect`, then undo what `launch` changed in this process. Does nothing where `launch` started no ranks."""
        if not self._environment:
            return []
        endings = self.collect()
        atexit.unregister(self._at_exit)
        _restore(self._environment)
        torch.set_num_threads(self._threads)
        return endings

    def _at_exit(self) -> None:
        if endings := self.collect():
            _say(f"Rank zero finished, but {'; '.join(endings)}.")
            leave()

    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        os.environ["NODE_RANK"] = str(self.cluster_environment.node_rank())
        os.environ["LOCAL_RANK"] = str(self.cluster_environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        command, directory = child_command()
        for local_rank in range(1, self.num_processes):
            environment = os.environ | {"LOCAL_RANK": str(local_rank), _LAUNCHER_PID: str(os.getpid())}
            self.procs.append(subprocess.Popen(command, env=environment, cwd=directory))

    def _observe(self) -> None:
        """End the run when a child ends with an error and neither rank zero nor its watchdog does so first."""
        while not self._collected.wait(0.5):
            failed = [(rank, p) for rank, p in enumerate(self.procs, start=1) if p.poll() not in (None, 0)]
            if failed and not self._failed.wait(_OWN_ERROR) and not self._collected.is_set():
                _say("; ".join(_describe(rank, process) for rank, process in failed) + ". This ends the run.")
                if self._failed.wait(_GRACE):
                    return  # rank zero raises; `collect` comes with the end of its process or job
                for process in self.procs:
                    process.kill()
                leave()
            if failed:
                return


def finish_job(trainer: pl.Trainer) -> None:
    """Clean up after a job, so that the next ``Trainer`` in this process (Hydra's multirun) can start its own ranks.

    Destroys the process group. In the process that started other ranks through ``trainer``, by this package's launcher
    or Lightning's, also waits for them to end and takes the rank environment back; elsewhere (a child, ``torchrun``,
    a cluster's launcher) the environment stays as it is. Call it on every rank, with the trainer that started them.

    Raises:
        RuntimeError: another rank ended with an error although rank zero succeeded.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    launcher = trainer.strategy.launcher
    endings: list[str] = []
    if isinstance(launcher, ScriptLauncher):
        endings = launcher.finish()
    elif isinstance(launcher, _SubprocessScriptLauncher) and launcher.procs:
        endings = wait_for(launcher.procs, _FAILED_END if trainer.interrupted else _JOB_END)
        _restore(_AT_IMPORT)
    if endings and not trainer.interrupted:
        raise RuntimeError(f"The job finished on rank zero, but {'; '.join(endings)}.")


def wait_for(processes: list[subprocess.Popen], seconds: float) -> list[str]:
    """Wait for ``processes``, the local ranks from 1 on, to end; after ``seconds`` kill the rest.

    Returns:
        One sentence for each that did not end with exit status 0 by itself.
    """
    deadline = time.monotonic() + seconds
    endings = []
    for rank, process in enumerate(processes, start=1):
        try:
            if process.wait(max(0.0, deadline - time.monotonic())) != 0:
                endings.append(_describe(rank, process))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            endings.append(
                f"local rank {rank} (process {process.pid}) did not end within {seconds:.0f} s and was killed"
            )
    return endings


def _restore(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _describe(local_rank: int, process: subprocess.Popen) -> str:
    who = f"local rank {local_rank} (process {process.pid})"
    if process.returncode < 0:
        return f"{who} was ended by {signal.Signals(-process.returncode).name}"
    return f"{who} ended with exit status {process.returncode}"


def _say(text: str) -> None:
    print(f"\n[lightning_tp] {text}", file=sys.stderr, flush=True)
