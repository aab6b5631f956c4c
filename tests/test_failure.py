"""A rank that raises or dies ends the run soon, with its error on the screen and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_tp.errors import ParallelConfigError
from lightning_tp.failure import Watchdog
from lightning_tp.failure_record import FailureRecord, is_consequence
from lightning_tp.testing import RankError, RankPool

ROOT = Path(__file__).parent.parent
LIMIT = 60.0  # seconds: what the issue allows from the failure to the end
MARK = "LIGHTNING_TP_TEST_RUN"


@dataclass(frozen=True)
class Run:
    """What a run of several ranks left: exit status of rank zero, seconds, its whole output, processes still alive."""

    status: int
    seconds: float
    output: str
    left: list[int]


def environment(mark: str) -> dict[str, str]:
    """This process's environment without its rank variables, marked to find the run's processes again."""
    names = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    base = {name: value for name, value in os.environ.items() if name not in names}
    return base | {MARK: mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def alive(mark: str) -> list[int]:
    """The processes of the run ``mark`` that have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def run_script(directory: Path, code: str, *arguments: object, limit: float = LIMIT) -> Run:
    """Run ``code`` as a script and give what is left after it some seconds to end."""
    script = directory / "train.py"
    script.write_text(textwrap.dedent(code))
    mark = uuid.uuid4().hex
    started = time.monotonic()
    # Into a file: a pipe would keep the test waiting for every process that holds it.
    with open(directory / "output.txt", "w+") as output:
        process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env=environment(mark),
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(limit)
            while (left := alive(mark)) and time.monotonic() - started < limit:
                time.sleep(0.2)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit} s:\n{(directory / 'output.txt').read_text()}") from None
        finally:
            seconds = time.monotonic() - started
            for pid in alive(mark):
                os.kill(pid, signal.SIGKILL)
        output.seek(0)
        return Run(status, seconds, output.read(), left)


def run_ranks(directory: Path, world_size: int, *arguments: object) -> Run:
    """Run `train_plainly` on forked ranks, rank zero the parent of the others as under a launcher.

    Forked rather than started: the imports are most of a script's time.
    """
    output = directory / "output.txt"
    process = mp.get_context("fork").Process(target=_fork_ranks, args=(output, world_size, arguments))
    started = time.monotonic()
    process.start()
    assert process.pid is not None
    try:
        process.join(LIMIT)
        while (left := session(process.pid)) and time.monotonic() - started < LIMIT:
            time.sleep(0.1)
    finally:
        seconds = time.monotonic() - started
        for pid in session(process.pid):
            os.kill(pid, signal.SIGKILL)
    assert process.exitcode is not None, f"still running after {LIMIT} s:\n{output.read_text()}"
    return Run(process.exitcode, seconds, output.read_text(), left)


def session(leader: int) -> list[int]:
    """The processes of the session of ``leader`` that have not ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _fork_ranks(output: Path, world_size: int, arguments: tuple[object, ...]) -> None:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - pytest has put its own in place
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    store = f"file://{output}.store"
    children = []
    for rank in range(1, world_size):
        if (pid := os.fork()) == 0:
            try:
                train_plainly(rank, world_size, store, *arguments)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(pid)
    train_plainly(0, world_size, store, *arguments)
    for pid in children:
        os.waitpid(pid, 0)


def train_plainly(rank: int, world_size: int, store: str, what: str, victim: int, silence: float = 25.0) -> None:
    """A training loop without Lightning: collectives, a watchdog, and at step 5 something happens to ``victim``."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    watchdog = Watchdog(rank, world_size, silence=silence, interval=0.5)
    watchdog.start()
    endless = what in ("raise", "kill", "stop", "exit", "last")
    try:
        for step in range(100_000 if endless else 8):
            if step == 5 and rank == victim:
                happen(what)
            dist.all_reduce(torch.ones(4))
            if what == "raise alone" and step == 5:
                if rank == victim:
                    raise ValueError("the loss is a banana")
                time.sleep(1000)  # where no broken connection wakes a survivor
            if what == "last" and step == 5:
                if rank == victim:
                    raise ValueError("the loss is a banana")
                break
            time.sleep(0.02)
    except BaseException as error:
        watchdog.report_failure(error)
        watchdog.stop()
        raise
    if rank == victim and what == "late":
        time.sleep(4)
    if what == "last":
        time.sleep(3)  # the other rank fails meanwhile; nothing but `stop` is left to tell this one
    watchdog.stop()
    print(f"rank {rank} finished", flush=True)


def happen(what: str) -> None:
    if what == "raise":
        raise ValueError("the loss is a banana")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "exit":
        sys.exit(0)
    if what == "sleep":
        time.sleep(8)
    if what == "spin":  # a C call that keeps the interpreter lock: no thread of this rank can beat
        started = time.monotonic()
        sum(range(400_000_000))
        assert time.monotonic() - started > 4


def assert_ended(run: Run) -> None:
    assert run.status != 0, run.output
    assert run.left == [], run.output
    assert run.seconds < LIMIT, run.output
    assert "finished" not in run.output


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what", ["raise", "raise alone"])
def test_a_rank_that_raises_ends_the_run_and_its_error_is_shown(tmp_path: Path, what: str, victim: int) -> None:
    run = run_ranks(tmp_path, 2, what, victim)
    assert_ended(run)
    assert run.status == 1
    assert "ValueError: the loss is a banana" in run.output
    if victim == 1:  # rank zero names it, before its own broken connection
        message = run.output.index("rank 1 (host")
        assert "Connection closed by peer" not in run.output[:message]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_and_is_named_once(tmp_path: Path, victim: int) -> None:
    run = run_ranks(tmp_path, 2, "kill", victim)
    assert_ended(run)
    assert f"rank {victim} died without a message" in run.output
    assert run.output.count("This ends the run.") == 1, run.output


def test_the_survivors_of_a_killed_rank_give_one_message_and_one_traceback(tmp_path: Path) -> None:
    run = run_ranks(tmp_path, 3, "kill", 2)
    assert_ended(run)
    assert run.output.count("This ends the run.") == 1, run.output
    assert run.output.count("Traceback") <= 1, run.output  # rank zero's own, with the cause as a note


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_ends_the_run(tmp_path: Path, victim: int) -> None:
    run = run_ranks(tmp_path, 2, "stop", victim, 4.0)
    assert_ended(run)
    assert f"rank {victim} " in run.output


def test_a_rank_that_exits_while_the_others_train_ends_the_run(tmp_path: Path) -> None:
    run = run_ranks(tmp_path, 2, "exit", 1, 4.0)
    assert_ended(run)
    assert "left with exit status 0" in run.output


def test_a_rank_that_has_finished_fails_when_another_one_failed(tmp_path: Path) -> None:
    run = run_ranks(tmp_path, 2, "last", 1)
    assert_ended(run)
    assert "ValueError: the loss is a banana" in run.output


@pytest.mark.parametrize(
    ("what", "victim"), [("none", 0), ("sleep", 1), ("late", 0), ("late", 1), ("spin", 0), ("spin", 1)]
)
def test_a_slow_or_busy_or_late_rank_is_no_failure(tmp_path: Path, what: str, victim: int) -> None:
    run = run_ranks(tmp_path, 2, what, victim, 3.0)
    assert run.status == 0, run.output
    assert run.output.count("finished") == 2
    assert "[lightning_tp]" not in run.output
    assert run.left == []


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_ranks_that_wait_for_rank_zero_do_not_outlive_it(tmp_path: Path, how: str) -> None:
    code = """
    import os, signal, sys, time
    import torch.distributed as dist
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning_tp.launcher import ScriptLauncher

    def train():
        if os.environ["LOCAL_RANK"] == "0":
            time.sleep(6)
            if sys.argv[1] == "raise":
                raise ValueError("no data")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.init_process_group("gloo", rank=1, world_size=2)
        print("finished")

    ScriptLauncher(LightningEnvironment(), 2, 1).launch(train)
    """
    run = run_script(tmp_path, code, how)
    assert_ended(run)
    assert ("ValueError: no data" if how == "raise" else "the process that started it is gone") in run.output


def test_a_child_that_fails_before_the_watch_begins_ends_rank_zero(tmp_path: Path) -> None:
    code = """
    import os, sys, time
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning_tp.launcher import ScriptLauncher

    def train():
        if os.environ["LOCAL_RANK"] == "1":
            sys.exit(7)
        time.sleep(1000)

    ScriptLauncher(LightningEnvironment(), 2, 1).launch(train)
    """
    run = run_script(tmp_path, code)
    assert_ended(run)
    assert run.status == 1
    assert "local rank 1" in run.output and "exit status 7" in run.output


TRAINER = """
import os, signal, sys
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from lightning_tp import TensorParallelStrategy


class Block(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)

    def training_step(self, batch, batch_idx):
        return self.down(torch.relu(self.up(batch))).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Fail(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 3 and sys.argv[1] == "endless" and trainer.global_rank == 0:
            print("training", flush=True)
        elif batch_idx == 3 and trainer.global_rank == int(sys.argv[2]):
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the loss is a banana")


data = DataLoader(torch.randn(64, 16), batch_size=2)
trainer = pl.Trainer(
    strategy=TensorParallelStrategy(tensor_parallel_size=2), accelerator="cpu", devices=2,
    max_epochs=-1 if sys.argv[1] == "endless" else 1,
    callbacks=[Fail()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(Block(), data)
print("finished")
"""


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what", ["raise", "kill"])
def test_a_failing_rank_ends_a_trainer(tmp_path: Path, what: str, victim: int) -> None:
    run = run_script(tmp_path, TRAINER, what, victim)
    assert_ended(run)
    shown = "ValueError: the loss is a banana" if what == "raise" else f"rank {victim} died without a message"
    assert shown in run.output


@pytest.mark.parametrize("which", ["rank zero", "all"])
def test_ctrl_c_leaves_no_process(tmp_path: Path, which: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, str(script), "endless", "0"],
        env=environment(mark),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert any("training" in line for line in process.stdout)
        time.sleep(1)
        (os.killpg if which == "all" else os.kill)(process.pid, signal.SIGINT)
        assert process.wait(LIMIT) != 0
        deadline = time.monotonic() + 10
        while (left := alive(mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == []
    finally:
        for pid in alive(mark):
            os.kill(pid, signal.SIGKILL)


def rank_and_sum(offset: int) -> tuple[int, float]:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def raise_on(victims: tuple[int, ...]) -> None:
    if dist.get_rank() in victims:
        raise ValueError(f"no luck on rank {dist.get_rank()}")


def test_the_tests_own_ranks_give_results_by_rank_and_the_tracebacks_of_failures() -> None:
    pool = RankPool(2)
    try:
        assert pool.run(rank_and_sum, 10) == [(0, 21.0), (1, 21.0)]
        with pytest.raises(RankError, match="no luck on rank 1"):
            pool.run(raise_on, (1,))  # rank zero waits in the barrier after it
        assert pool.run(rank_and_sum, 0) == [(0, 1.0), (1, 1.0)]
        with pytest.raises(RankError, match=r"(?s)no luck on rank 0.*no luck on rank 1"):
            pool.run(raise_on, (0, 1))
        assert pool.run(rank_and_sum, 0) == [(0, 1.0), (1, 1.0)]
        with pytest.raises(RankError, match="exit code 5"):
            pool.run(os._exit, 5)
        with pytest.raises(RankError, match="without an answer"):
            pool.run(time.sleep, 60, timeout=8.0)
    finally:
        pool.close()


def test_a_record_survives_the_store() -> None:
    try:
        raise ValueError('quotes " and\nlines')
    except ValueError as error:
        record = FailureRecord.of_exception(3, "node7", error)
    assert FailureRecord.from_json(record.to_json().encode()) == record
    assert FailureRecord.from_json(b"") is None
    assert "rank 3 (host node7" in record.message() and 'quotes " and' in record.message()


def test_only_errors_of_a_lost_peer_wait_for_the_original() -> None:
    assert is_consequence(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"))
    assert not is_consequence(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_consequence(ValueError("connection"))


def test_silence_shorter_than_the_heartbeat_is_an_error() -> None:
    with pytest.raises(ParallelConfigError, match="silence"):
        Watchdog(0, 2, silence=1.0, interval=1.0)


def test_one_rank_needs_no_watch() -> None:
    threads = threading.enumerate()
    watchdog = Watchdog(0, 1)
    watchdog.start()
    assert threading.enumerate() == threads
    watchdog.report_failure(ValueError())
    watchdog.stop()
