"""Run functions on ranks that are started once."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_OTHERS = 5.0  # seconds that the other ranks get to answer when one has failed


class RankError(AssertionError):
    """A function failed on at least one rank. The message holds the traceback of each rank that failed."""


class RankPool:
    """``world_size`` gloo processes with one thread each, started at the first `run` and kept until `close`.

    Lightning strategies work inside: the rank environment is set and the process group is initialised.

    Args:
        world_size: Number of ranks.
        collective_timeout: Seconds after which a collective that does not end is an error on its rank. One rank plans
            while the others wait for it in a collective, so large models need more.
    """

    def __init__(self, world_size: int, collective_timeout: float = 60.0) -> None:
        self.world_size = world_size
        self.collective_timeout = collective_timeout
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """``function(*args)`` on every rank, between two barriers; the results by rank.

        Args:
            function: importable at module level; the rank is ``torch.distributed.get_rank()``.
            args: picklable, the same for every rank.
            timeout: seconds after which all ranks are killed.

        Raises:
            RankError: a rank raised, died, or did not finish in time. The next `run` starts new processes unless every
                rank raised.
        """
        if not self._processes:
            self._start()
        work = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(work)
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(errors) < self.world_size:
            pending = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results and rank not in errors]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in (pipe for pipe in self._pipes if pipe in ready):
                rank = self._pipes.index(pipe)
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[rank].join(5.0)
                    ok, value = False, f"the process ended with exit code {self._processes[rank].exitcode}"
                (results if ok else errors)[rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + _OTHERS)
        if len(results) == self.world_size:
            return [results[rank] for rank in range(self.world_size)]
        unanswered = [rank for rank in range(self.world_size) if rank not in results and rank not in errors]
        alive = all(process.is_alive() for process in self._processes)
        if len(errors) < self.world_size or not alive:
            self._kill()
        report = [f"rank {rank}: {error}" for rank, error in sorted(errors.items())]
        if unanswered:
            after = "the others had failed" if errors else f"{timeout:.0f} s"
            report.append(f"ranks without an answer after {after}: {unanswered}")
        raise RankError(f"{getattr(function, '__qualname__', function)} failed.\n" + "\n".join(report))

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with suppress(OSError):  # it died: nothing to end
                pipe.send_bytes(b"")
        for process in self._processes:
            process.join(10.0)
        self._kill()

    def _start(self) -> None:
        # The store lives here: its port is free by construction, and no rank has to be first.
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        context = mp.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world_size, self._store.port, self.collective_timeout, theirs),
                name=f"test-rank-{rank}",
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _serve(rank: int, world_size: int, port: int, collective_timeout: float, pipe: Connection) -> None:
    from lightning_tp.process import exit_with_parent

    exit_with_parent(os.getppid(), f"test rank {rank}")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    timeout = timedelta(seconds=collective_timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    while work := pipe.recv_bytes():
        os.environ.update(  # before every run: Lightning's environment removes WORLD_SIZE when it is torn down
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            NODE_RANK="0",
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            OMP_NUM_THREADS="1",
        )
        try:
            function, args = pickle.loads(work)
            dist.barrier()
            answer = pickle.dumps((True, function(*args)))
            dist.barrier()
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)
    dist.destroy_process_group()
