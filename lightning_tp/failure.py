"""A rank that raises or dies ends the whole run: the watchdog of one rank, and how a process leaves.

Every rank runs one daemon thread. It shares nothing with the collectives of the training thread: rank zero hosts a
separate ``TCPStore``, every rank holds its own connection to it. The keys, all written before a rank reads them:

| key | written by | value |
|---|---|---|
| ``alert`` | the first rank that fails, or that finds a dead peer | one `FailureRecord`, never overwritten |
| ``state/k`` | rank k | ``run``, ``failed`` or ``done`` |
| ``beat/k`` | rank k, every interval | a counter |
| ``seen/k`` | rank k | ``1`` when it knows of the alert, or that rank zero is done |

A peer counts as dead when its process is gone (same host, found within one interval), or when rank zero has seen
neither a new beat nor, on the same host, any use of processor time for ``silence`` seconds. A thread cannot beat while
C code holds the interpreter lock; the second condition keeps such a rank from being taken for dead.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import psutil
import torch.distributed as dist

from lightning_tp.errors import ParallelConfigError
from lightning_tp.failure_record import FailureRecord, PeerFailureError, is_consequence
from lightning_tp.process import host_location, leave

T = TypeVar("T")

_LOOPBACK = "127.0.0.1"
_GRACE = 3.0  # seconds that a survivor's training thread gets to end by itself
_ORIGINAL_WAIT = 5.0  # seconds that a rank with a broken connection waits to learn who broke it
_SEEN_WAIT = 3.0  # seconds that a failing rank zero keeps its store for the others to read the alert
_DONE_WAIT = 10.0  # seconds that a finished rank zero keeps its store for the others to read that it is done
_UNWIND_WAIT = 30.0  # seconds that a failed rank may take for its own teardown, and again for the interpreter's exit


class Watchdog:
    """Ends this rank when another rank of the run has failed, and tells the others when this one fails.

    Args:
        rank: global rank of this process.
        world_size: number of ranks of the run. With one rank there is nothing to watch.
        silence: seconds without a sign of life after which a peer counts as dead.
        interval: seconds between two heartbeats.

    Raises:
        ParallelConfigError: ``silence`` is shorter than two heartbeats.
    """

    def __init__(self, rank: int, world_size: int, silence: float = 25.0, interval: float = 1.0) -> None:
        if silence < 2 * interval:
            raise ParallelConfigError(
                f"Watchdog got silence={silence} s with interval={interval} s. A rank beats once an interval, so "
                f"silence must be at least {2 * interval} s. Raise silence or lower interval."
            )
        self.rank = rank
        self.world_size = world_size
        self.silence = silence
        self.interval = interval
        self._host = socket.gethostname()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ the training thread

    def start(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Watch from now on, if it does not yet. Collective over ``process_group`` (default: all ranks)."""
        if self.world_size == 1 or self._thread is not None:
            return
        self._timeout = timedelta(seconds=self.silence)
        store = None
        if self.rank == 0:
            store = dist.TCPStore(_LOOPBACK, 0, None, True, timeout=self._timeout, wait_for_workers=False)
            store.set("alert", "")
            for rank in range(self.world_size):
                store.set(f"state/{rank}", "run")
                store.set(f"beat/{rank}", "0")
                store.set(f"seen/{rank}", "0")
        members: list[tuple[str, int, int]] = [("", 0, 0)] * self.world_size
        port = 0 if store is None else store.port
        dist.all_gather_object(members, (host_location(), os.getpid(), port), group=process_group)

        location, _, self._port = members[0]
        self._address = _LOOPBACK if location == host_location() else os.environ["MASTER_ADDR"]
        self._store = store or self._connect()
        self._store_open = True
        self._peers: dict[int, psutil.Process | None] = {}  # ranks of this host; None: gone before it was looked at
        for rank, (location, pid, _) in enumerate(members):
            if rank != self.rank and location == host_location():
                self._peers[rank] = _process(pid)
        self._finished: set[int] = set()
        self._beats: dict[int, bytes] = {}
        self._silent = dict.fromkeys(range(self.world_size), 0.0)
        self._processor_time: dict[int, float] = {}
        self._status = "run"
        self._printed = False
        self._print_lock = threading.Lock()
        self._alert: FailureRecord | None = None
        self._alert_known = threading.Event()
        self._wake = threading.Event()
        self._unwound = threading.Event()
        self._exiting = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning_tp-watchdog", daemon=True)
        self._thread.start()

    def report_failure(self, exception: BaseException) -> None:
        """Tell the other ranks that this one fails with ``exception``, which is about to be raised further.

        An error that only follows from another rank's (a closed connection) waits a few seconds for that rank's record:
        the rank that prints then shows the original first, the other survivors leave without a traceback of their own.
        """
        if self._thread is None or self._status != "run":
            return
        self._status = "failed"  # from here on the watching thread leaves the exit to this one
        atexit.register(self._exiting.set)
        self._wake.set()
        if is_consequence(exception):
            self._alert_known.wait(_ORIGINAL_WAIT)
        record = FailureRecord.of_exception(self.rank, self._host, exception)
        original = self._alert or self._declare(record)
        self._set(f"state/{self.rank}", "failed")
        if original.rank != self.rank and is_consequence(exception):
            self._set(f"seen/{self.rank}", "1")
            if not self._prints(original):
                leave()
            self._print(original)
            exception.add_note(f"This error is a consequence of another: {original.headline()}.")
        if self.rank == 0:
            self._wait_for_peers(_SEEN_WAIT)

    def stop(self) -> None:
        """End the watch: this rank is done and may leave at any time. Does nothing if it does not watch.

        Raises:
            PeerFailureError: another rank has failed, so that this rank's success is not the run's.
        """
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        if self._status == "failed":
            self._unwound.set()
            return
        self._status = "done"
        self._wake.set()
        thread.join(2 * self.silence)
        record = self._alert or self._last_look()
        if record is not None and not record.is_clean:
            self._set(f"state/{self.rank}", "failed")
            if self._prints(record):
                self._print(record)
            raise PeerFailureError(record.headline())

    def _last_look(self) -> FailureRecord | None:
        """Mark this rank as done unless the run has failed; returns the failure."""
        try:
            record = self._look()
            if record is None:
                self._set(f"state/{self.rank}", "done")
                if self.rank == 0:
                    record = self._wait_for_peers(_DONE_WAIT)
            return record
        except RuntimeError as error:
            return self._store_lost(error)

    def _wait_for_peers(self, seconds: float) -> FailureRecord | None:
        """Keep rank zero's store until every peer knows how this rank ended. Returns a failure that comes up then."""
        deadline = time.monotonic() + seconds
        peers = [rank for rank in range(1, self.world_size) if rank not in self._finished]
        while peers and time.monotonic() < deadline:
            gone = {rank for rank in peers if self._is_gone(rank)}  # before the states: done is written before the exit
            seen = self._store.multi_get([f"seen/{rank}" for rank in peers])
            states = self._store.multi_get([f"state/{rank}" for rank in peers])
            waiting = [r for r, s, state in zip(peers, seen, states, strict=True) if s != b"1" and state == b"run"]
            if self._status == "done":
                record = FailureRecord.from_json(self._store.get("alert"))
                if record is None and gone.intersection(waiting):
                    record = self._declare(FailureRecord.dead(min(gone.intersection(waiting)), self._host))
                if record is not None:
                    return record
            peers = [rank for rank in waiting if rank not in gone]
            time.sleep(0.05)
        return None

    # ------------------------------------------------------------------ the watching thread

    def _watch(self) -> None:
        last = time.monotonic()
        while self._status != "done":
            self._wake.wait(self.interval)
            self._wake.clear()
            # A round that came late saw nothing in between: it must not count that time as a peer's silence.
            elapsed, last = min(time.monotonic() - last, 2 * self.interval), time.monotonic()
            try:
                record = self._within(self.silence / 2, partial(self._look, elapsed))
            except RuntimeError as error:
                record = self._reconnect(error)
            if record is not None:
                self._store_open = record.rank != 0 or record.kind not in ("dead", "silent")
                self._alert = record
                self._alert_known.set()
                self._react(record)
                return
            if not self._store_open:  # rank zero is done
                return

    def _look(self, elapsed: float = 0.0) -> FailureRecord | None:
        """One round: beat, look for an alert, for peers whose process is gone and, on rank zero, for silent ones."""
        # Gone processes first: the store of a dead rank zero answers with a page of C++ stack trace on the screen.
        gone = [rank for rank in self._peers if rank not in self._finished and self._is_gone(rank)]
        if 0 in gone:
            return FailureRecord.dead(0, self._host)
        if not self._store_open:
            return None
        self._store.set(f"beat/{self.rank}", repr(time.monotonic()))
        record = FailureRecord.from_json(self._store.get("alert"))
        if record is not None:
            return record
        watched = range(1, self.world_size) if self.rank == 0 else sorted({0, *gone})
        watched = [rank for rank in watched if rank not in self._finished]
        states = dict(zip(watched, self._store.multi_get([f"state/{rank}" for rank in watched]), strict=True))
        self._finished |= {rank for rank, state in states.items() if state == b"done"}
        if 0 in self._finished:
            self._store.set(f"seen/{self.rank}", "1")
            self._store_open = False
            return None
        for rank in gone:
            if states[rank] == b"run":
                return self._declare(FailureRecord.dead(rank, self._host))
        if self.rank == 0:
            for rank in self._silent_peers([rank for rank in watched if states[rank] == b"run"], elapsed):
                return self._declare(
                    FailureRecord.silent(rank, self._host, f"no sign of life for {self.silence:.0f} s")
                )
        return None

    def _silent_peers(self, ranks: list[int], elapsed: float) -> list[int]:
        """The ``ranks`` without a sign of life for ``silence`` seconds, of which the last round watched ``elapsed``."""
        if not ranks:
            return []
        for rank, beat in zip(ranks, self._store.multi_get([f"beat/{rank}" for rank in ranks]), strict=True):
            processor_time = _processor_time(self._peers.get(rank))
            alive = beat != self._beats.get(rank) or processor_time != self._processor_time.get(rank, 0.0)
            self._silent[rank] = 0.0 if alive else self._silent[rank] + elapsed
            self._beats[rank] = beat
            self._processor_time[rank] = processor_time
        return [rank for rank in ranks if self._silent[rank] >= self.silence]

    def _within(self, seconds: float, function: Callable[[], T]) -> T:
        """The result of ``function``, which uses the store.

        Raises:
            RuntimeError: the connection is broken, or there is no answer within ``seconds`` of this thread's attention.
        """
        outcome: list[T | RuntimeError] = []

        def call() -> None:
            try:
                outcome.append(function())
            except RuntimeError as error:
                outcome.append(error)

        # In a thread: most operations of a TCPStore wait without limit for a server whose process is stopped.
        thread = threading.Thread(target=call, name="lightning_tp-store", daemon=True)
        thread.start()
        waited = 0.0
        while not outcome and waited < seconds:
            before = time.monotonic()
            thread.join(self.interval)
            waited += min(time.monotonic() - before, 2 * self.interval)
        if not outcome:
            raise RuntimeError(f"no answer within {seconds:.0f} s")
        if isinstance(outcome[0], RuntimeError):
            raise outcome[0]
        return outcome[0]

    def _reconnect(self, error: RuntimeError) -> FailureRecord | None:
        """Called when the store does not answer: connects anew, and gives rank zero up if that fails too."""
        if self._is_gone(0):
            return FailureRecord.dead(0, self._host)
        try:
            # A plain socket first: a TCPStore whose server refuses prints pages of stack trace.
            socket.create_connection((self._address, self._port), timeout=self.silence / 2).close()
            self._store = self._within(self.silence / 2, self._connect)
            return None
        except (OSError, RuntimeError) as second:
            return self._store_lost(RuntimeError(f"{error}; and again: {second}"))

    def _store_lost(self, error: RuntimeError) -> FailureRecord:
        return FailureRecord.silent(0, self._host, f"its store does not answer: {str(error).splitlines()[0]}")

    def _react(self, record: FailureRecord) -> None:
        """Give the training thread time to end by itself, print who failed, and leave the process."""
        if record.kind == "silent" and (process := self._peers.get(record.rank)) is not None:
            with suppress(psutil.NoSuchProcess):
                process.kill()  # it cannot read the alert
        self._set(f"seen/{self.rank}", "1")
        if not record.is_exit and self._prints(record):
            self._print(record)
        deadline = time.monotonic() + (self.silence if record.is_clean else _GRACE)
        while self._status == "run" and time.monotonic() < deadline:
            time.sleep(0.1)
        if self._status == "done":
            return  # `stop` decides
        if self._status == "run":
            if self._prints(record):
                self._print(record)
            leave()
        if not self._unwound.wait(_UNWIND_WAIT):
            self._say(f"rank {self.rank} has failed and did not end within {_UNWIND_WAIT:.0f} s; it is ended now.")
            leave()
        # What still may hang is the end of the interpreter: the communicator of a dead peer, a logger's upload.
        self._exiting.wait()
        time.sleep(_UNWIND_WAIT)
        leave()

    # ------------------------------------------------------------------ both threads

    def _declare(self, record: FailureRecord) -> FailureRecord:
        """Write ``record`` as the run's failure unless there is one already; returns the one that counts."""
        if not self._store_open:
            return record
        try:
            return FailureRecord.from_json(self._store.compare_set("alert", "", record.to_json())) or record
        except RuntimeError:  # the store went with rank zero; the watching thread finds that out by itself
            return record

    def _set(self, key: str, value: str) -> None:
        if self._store_open:
            with suppress(RuntimeError):  # the store went with rank zero: nobody is left to read it
                self._store.set(key, value)

    def _connect(self) -> dist.TCPStore:
        return dist.TCPStore(self._address, self._port, None, False, timeout=self._timeout)

    def _is_gone(self, rank: int) -> bool:
        """Whether the process of ``rank`` has ended. Always False for a rank of another host."""
        if rank not in self._peers:
            return False
        process = self._peers[rank]
        try:
            return process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def _prints(self, record: FailureRecord) -> bool:
        """Whether this rank shows ``record``: the lowest living one does. Rank zero's own error shows as it raises."""
        if record.rank == 0 and record.kind in ("error", "interrupt"):
            return False
        return not any(rank != record.rank and not self._is_gone(rank) for rank in range(self.rank))

    def _print(self, record: FailureRecord) -> None:
        with self._print_lock:
            if self._printed:
                return
            self._printed = True
        self._say(record.message())

    @staticmethod
    def _say(text: str) -> None:
        print(f"\n[lightning_tp] {text}", file=sys.stderr, flush=True)


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _processor_time(process: psutil.Process | None) -> float:
    """Seconds of processor time that ``process`` has used; 0 for one that cannot be looked at from here."""
    if process is None:
        return 0.0
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system
