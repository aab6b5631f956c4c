"""Children run exactly the parent's job, and a job leaves nothing behind for the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lightning_tp.errors import ParallelConfigError
from lightning_tp.launcher import ScriptLauncher, finish_job, wait_for

ROOT = Path(__file__).parent.parent
RANK_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Every rank appends what it sees of its job to one file.
APP = """
import json, os, sys
from types import SimpleNamespace

import hydra
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning_tp.launcher import ScriptLauncher, finish_job


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    hydra_config = HydraConfig.get()
    job = {
        "rank": int(os.environ.get("LOCAL_RANK", 0)),
        "text": config.text,
        "number": config.number,
        "job": config.job,
        "where": config.where,
        "overrides": list(hydra_config.overrides.task),
        "output": hydra_config.runtime.output_dir,
        "directory": os.getcwd(),
        "mode": hydra_config.mode.name,
    }
    launcher = ScriptLauncher(LightningEnvironment(), 2, 1)

    def record():
        with open(os.environ["RECORD"], "a") as file:
            file.write(json.dumps(job | {"world": os.environ["WORLD_SIZE"]}) + "\\n")

    launcher.launch(record)
    finish_job(SimpleNamespace(strategy=SimpleNamespace(launcher=launcher), interrupted=False))
    if job["rank"] == 0:
        assert not {"LOCAL_RANK", "MASTER_PORT", "WORLD_SIZE"} & set(os.environ)
    else:
        assert os.environ["LOCAL_RANK"] == "1"


if __name__ == "__main__":
    main()
"""

CONFIG = """
text: default
number: 0
job: ${hydra:job.name}
where: ${hydra:runtime.output_dir}
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A directory with a Hydra app that starts two ranks, as script and as module."""
    package = tmp_path / "my app" / "pkg"
    (package / "conf").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "train.py").write_text(APP)
    (package / "conf" / "config.yaml").write_text(CONFIG)
    (package / "conf" / "other.yaml").write_text(CONFIG.replace("default", "other"))
    (package.parent / "extra" / "group").mkdir(parents=True)
    (package.parent / "extra" / "group" / "seven.yaml").write_text("# @package _global_\nnumber: 7\n")
    return package.parent


def run(app: Path, *arguments: str) -> list[dict[str, Any]]:
    """What each rank of each job recorded, in the order of the jobs, rank zero first."""
    record = app / "record.jsonl"
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment |= {"PYTHONPATH": str(ROOT), "RECORD": str(record)}
    done = subprocess.run([sys.executable, *arguments], cwd=app, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(line) for line in record.read_text().splitlines()]
    return sorted(ranks, key=lambda entry: (entry["output"], entry["rank"]))


def without_rank(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in ("rank", "mode")}


def test_every_job_of_a_sweep_starts_its_own_ranks_with_its_own_overrides(app: Path) -> None:
    ranks = run(app, "pkg/train.py", "-m", "number=1,2", "text='a, b=c'", 'hydra.sweep.dir="out put/${now:%f},x=1\'2"')
    assert [(entry["number"], entry["rank"]) for entry in ranks] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for zero, one in (ranks[:2], ranks[2:]):
        assert without_rank(zero) == without_rank(one)
        assert (zero["mode"], one["mode"]) == ("MULTIRUN", "RUN")
        assert zero["text"] == "a, b=c"
        assert len(zero["overrides"]) == 2


def test_a_module_with_another_config_and_an_extra_directory(app: Path) -> None:
    arguments = ["--config-name", "other", "--config-dir", "extra", "+group=seven", "hydra.job.chdir=True"]
    ranks = run(app, "-m", "pkg.train", *arguments)
    assert [entry["rank"] for entry in ranks] == [0, 1]
    zero, one = ranks
    assert without_rank(zero) == without_rank(one)
    assert (zero["text"], zero["number"]) == ("other", 7)
    assert zero["directory"] == zero["output"]


def test_a_plain_script_is_run_again_with_its_arguments(app: Path) -> None:
    (app / "plain.py").write_text(
        textwrap.dedent("""
        import json, os, sys
        from lightning.fabric.plugins.environments import LightningEnvironment
        from lightning_tp.launcher import ScriptLauncher

        def record():
            with open(os.environ["RECORD"], "a") as file:
                entry = {"rank": int(os.environ["LOCAL_RANK"]), "output": sys.argv[1:]}
                file.write(json.dumps(entry) + "\\n")

        ScriptLauncher(LightningEnvironment(), 2, 1).launch(record)
        """)
    )
    ranks = run(app, "plain.py", "--lr", "a b=1")
    assert ranks == [{"rank": rank, "output": ["--lr", "a b=1"]} for rank in (0, 1)]


def test_without_a_script_the_error_says_what_to_do(tmp_path: Path) -> None:
    code = "from lightning_tp.child_command import child_command; child_command()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 1
    assert ParallelConfigError.__name__ in done.stderr.decode() and "torchrun" in done.stderr.decode()


@dataclass
class Strategy:
    launcher: object


@dataclass
class Trainer:
    strategy: Strategy
    interrupted: bool = False


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_where_others_started_the_ranks_the_environment_stays(monkeypatch: pytest.MonkeyPatch, local_rank: str) -> None:
    """A child of ours and a rank of torchrun: both were given their rank from outside."""
    values = {"LOCAL_RANK": local_rank, "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for kind in (ScriptLauncher, _SubprocessScriptLauncher):
        launcher = kind(LightningEnvironment(), 2, 1)
        assert launcher.launch(lambda: "result") == "result"
        finish_job(Trainer(Strategy(launcher)))  # type: ignore[arg-type]
    finish_job(Trainer(Strategy(None)))  # type: ignore[arg-type]
    assert {name: os.environ[name] for name in values} == values


def sleeping(seconds: float, status: int = 0) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-S", "-c", f"import time; time.sleep({seconds}); raise SystemExit({status})"]
    )


def test_lightnings_own_launcher_is_cleaned_up_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_tp.launcher._AT_IMPORT", {"LOCAL_RANK": None, "MASTER_ADDR": "10.0.0.1"})
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    launcher = _SubprocessScriptLauncher(LightningEnvironment(), 2, 1)
    launcher.procs = [sleeping(0.2)]
    finish_job(Trainer(Strategy(launcher)))  # type: ignore[arg-type]
    assert launcher.procs[0].returncode == 0
    assert "LOCAL_RANK" not in os.environ and os.environ["MASTER_ADDR"] == "10.0.0.1"


def test_a_child_that_failed_is_an_error_of_the_job() -> None:
    launcher = _SubprocessScriptLauncher(LightningEnvironment(), 2, 1)
    launcher.procs = [sleeping(0), sleeping(0, status=3)]
    with pytest.raises(RuntimeError, match=r"local rank 2 .* exit status 3"):
        finish_job(Trainer(Strategy(launcher)))  # type: ignore[arg-type]


def test_children_that_do_not_end_are_killed_and_named() -> None:
    slow, quick = sleeping(100), sleeping(0)
    endings = wait_for([slow, quick], 1.0)
    assert slow.returncode == -9
    assert len(endings) == 1 and "local rank 1" in endings[0] and "was killed" in endings[0]
