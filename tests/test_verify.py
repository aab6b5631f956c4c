"""`lightning-tp verify` passes runs that agree, fails runs that do not, and says what it cannot compare."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import OmegaConf

from lightning_tp import cli
from lightning_tp.callbacks.step_recorder import StepRecord
from lightning_tp.verify import (
    Job,
    RunResult,
    VerifyError,
    composed,
    relative_difference,
    report,
    run_both,
    save_batches,
)

ROOT = Path(__file__).parent.parent
STEPS = 3

APP = '''
import os, time
import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader


class Data(lightning.LightningDataModule):
    def __init__(self, batches=24):
        super().__init__()
        self.batches = batches

    def setup(self, stage):
        generator = torch.Generator().manual_seed(1)
        self.data = torch.randn(4 * self.batches, 8, generator=generator)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=4, shuffle=True)


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(lightning.LightningModule):
    def __init__(self, optimizer, dropout=0.0, hang=False):
        super().__init__()
        self.optimizer, self.hang = optimizer, hang
        self.block = Block(dropout)

    def training_step(self, batch, batch_idx):
        if self.hang and self.trainer.world_size > 1:
            time.sleep(600)
        return (self.block(batch) - batch.roll(1, dims=1)).square().mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class Perturbed(DDPStrategy):
    """Scales one gradient by 1 + 1e-7 before the optimizer sees it."""

    def backward(self, *args, **kwargs):
        loss = super().backward(*args, **kwargs)
        self.lightning_module.block.up.bias.grad.mul_(1 + 1e-7)
        return loss


class OneRankFails(DDPStrategy):
    def backward(self, *args, **kwargs):
        raise RuntimeError(f"rank {self.global_rank} is broken on purpose")
'''

CONFIG = """
seed: 3
width: 8
data:
  _target_: my_app.Data
model:
  _target_: my_app.Model
  dropout: 0.1
  optimizer: ${optimizer}
optimizer:
  _target_: torch.optim.AdamW
  _partial_: true
  lr: 0.01
trainer:
  _target_: lightning.Trainer
  accelerator: cpu
  devices: 2
  precision: 64-true
  gradient_clip_val: 0.1
  max_steps: 1000
  default_root_dir: ${hydra:runtime.output_dir}
  logger: ${oc.env:SURELY_NOT_SET}
strategy:
  _target_: lightning_tp.TensorParallelStrategy
  tensor_parallel_size: 2
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A Hydra app of a user: its module in a folder, its config in another one beside it."""
    (tmp_path / "my_app.py").write_text(textwrap.dedent(APP))
    settings = tmp_path / "settings"
    settings.mkdir()
    (settings / "main.yaml").write_text(CONFIG)
    return tmp_path


def run_command(app: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command from a folder that is not the app's."""
    elsewhere = app / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lightning_tp.cli", "verify", "--config-path", str(app / "settings")]
    command += ["--config-name", "main", "--steps", str(STEPS), *arguments]
    return subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=240)


def compare(
    app: Path, strategy: str, overrides: Sequence[str] = (), timeout: float = 120.0, **changes: Any
) -> tuple[RunResult, RunResult]:
    """Both runs under a data-parallel strategy on two processes: what the command does after its checks."""
    sys.path.insert(0, str(app))
    try:
        workdir = app / "work"
        workdir.mkdir()
        with composed(app / "settings", "main", overrides, workdir) as config:
            trainer = {"_target_": "lightning.Trainer", "accelerator": "cpu", "precision": "64-true"}
            job = Job(
                model=OmegaConf.to_container(config.model, resolve=True),  # type: ignore[arg-type]
                trainer=trainer | {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
                strategy={"_target_": strategy},
                seed=3,
                steps=STEPS,
                devices=2,
                data_parallel_size=2,
            )
            job = replace(job, **changes)
            save_batches(config, job, workdir)
        return run_both(job, workdir, timeout, [str(app), str(ROOT)])
    finally:
        sys.path.remove(str(app))
        sys.modules.pop("my_app", None)


# ---- runs


def test_data_parallel_runs_with_accumulation_and_dropout_agree(app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single, parallel = compare(app, "lightning.pytorch.strategies.DDPStrategy")
    assert len(single.steps) == len(parallel.steps) == STEPS
    assert single.steps[0].loss != single.steps[1].loss
    assert single.initial_weights == parallel.initial_weights
    assert single.dropout == parallel.dropout == 0.1
    capsys.readouterr()
    assert report(single, parallel, 1e-10) == 0
    printed = capsys.readouterr().out
    assert "PASS" in printed
    assert "Dropout (up to p=0.1) was switched off" in printed
    assert f"{single.steps[2].loss:.10g}" in printed


def test_a_perturbed_run_fails(app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single, parallel = compare(app, "my_app.Perturbed")
    assert report(single, parallel, 1e-10) == 1
    assert "FAIL: the largest relative difference is" in capsys.readouterr().out
    # The perturbation is small: a looser tolerance accepts it.
    assert report(single, parallel, 1e-4) == 0


def test_a_run_that_fails_shows_its_error(app: Path) -> None:
    with pytest.raises(VerifyError, match=r"(?s)the parallel run failed with exit status.*broken on purpose"):
        compare(app, "my_app.OneRankFails")


def test_a_run_that_hangs_is_killed_with_all_its_ranks(app: Path) -> None:
    start = time.monotonic()
    with pytest.raises(VerifyError, match="the parallel run did not end within 30 s"):
        compare(app, "lightning.pytorch.strategies.DDPStrategy", ["+model.hang=true"], timeout=30.0)
    assert time.monotonic() - start < 90
    assert not processes_of(app)


def processes_of(app: Path) -> list[int]:
    """Processes whose command line names the working folder of the runs of ``app``."""
    folder = str(app / "work")
    return [process.pid for process in psutil.process_iter(["cmdline"]) if folder in (process.info["cmdline"] or [])]


def test_too_few_batches_are_an_error(app: Path) -> None:
    with pytest.raises(VerifyError, match=r"gave 5 batches, but 12 are needed .*Lower --steps"):
        compare(app, "lightning.pytorch.strategies.DDPStrategy", ["+data.batches=5"])


# ---- tensor-parallel runs of the command


def test_a_users_own_app_passes(app: Path) -> None:
    result = run_command(app, "--tolerance", "1e-10", "optimizer.lr=0.02")
    assert result.returncode == 0, result.stderr
    assert "PASS" in result.stdout
    assert "Split over tp: " in result.stdout


def test_data_parallel_times_tensor_parallel_passes(app: Path) -> None:
    result = run_command(app, "--devices", "4", "strategy.tensor_parallel_size=2", "+strategy.data_parallel_size=2")
    assert result.returncode == 0, result.stderr
    assert "the tolerance 1e-10" in result.stdout


def test_a_perturbed_tensor_parallel_run_exits_1(app: Path) -> None:
    (app / "perturbed.py").write_text(
        textwrap.dedent(
            """
            from lightning_tp import TensorParallelStrategy

            class Perturbed(TensorParallelStrategy):
                def backward(self, closure_loss, *args, **kwargs):
                    return super().backward(closure_loss * (1 + 1e-7), *args, **kwargs)
            """
        )
    )
    result = run_command(app, "strategy._target_=perturbed.Perturbed")
    assert result.returncode == 1, result.stderr
    assert "FAIL" in result.stdout


# ---- usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["~model"], "no `model` with a `_target_`"),
        (["~data"], "no `data` with a `_target_`"),
        (["~trainer"], "no `trainer` with a `_target_`"),
        (["strategy=auto"], "`strategy` is 'auto', which is not tensor-parallel"),
        (["~strategy", "+trainer.strategy=ddp"], "`trainer.strategy` is 'ddp', which is not tensor-parallel"),
        (["strategy._target_=lightning.pytorch.strategies.DDPStrategy"], "DDPStrategy', which is not tensor-parallel"),
        (["trainer.devices=auto"], "Give --devices N"),
        (["--devices", "3"], "tensor_parallel_size=2 does not divide the 3 ranks"),
        (["trainer.precison=64-true"], "trainer.precision"),
        (["--config-name", "train"], "there is no train.yaml in"),
        (["--steps", "0"], "at least one step"),
        (["--step-size", "3"], "unknown option --step-size"),
    ],
)
def test_bad_usage_exits_2_and_says_what_to_change(
    app: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    command = ["verify", "--config-path", str(app / "settings"), "--config-name", "main", *arguments]
    try:
        status = cli.main(command)
    except SystemExit as exit:  # raised by argparse
        status = exit.code  # type: ignore[assignment]
    assert status == 2
    assert message in capsys.readouterr().err


# ---- the comparison itself


def result(*steps: tuple[float, float], weights: str = "a") -> RunResult:
    return RunResult([StepRecord(*step) for step in steps], {"w": weights}, dropout=0.0, split_share=None)


def test_relative_difference() -> None:
    assert relative_difference(0.0, 0.0) == 0.0
    assert relative_difference(2.0, 1.0) == 0.5
    assert relative_difference(-1.0, 1.0) == 2.0
    assert relative_difference(math.nan, math.nan) == math.inf
    assert relative_difference(math.inf, math.inf) == math.inf


@pytest.mark.parametrize(("parallel", "status"), [((2.0, 3.0), 0), ((2.1, 3.0), 1), ((2.0, 3.2), 1)])
def test_both_loss_and_norm_are_held_to_the_tolerance(
    parallel: tuple[float, float], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(result((1.0, 1.0), (2.0, 3.0)), result((1.0, 1.0), parallel), 0.04) == status
    assert ("FAIL" in capsys.readouterr().out) == bool(status)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_fails(value: float, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [(1.0, 1.0), (1.0, value)]
    assert report(result(*steps), result(*steps), 1e-2) == 1
    assert "inf (grad norm of step 2)" in capsys.readouterr().out


def test_different_initial_weights_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    report(result((1.0, 1.0)), result((1.0, 1.0), weights="b"), 1e-5)
    assert "The runs started from different weights: w." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("64-true", 1e-10), (64, 1e-10), ("32-true", 1e-5), (None, 1e-5), ("bf16-mixed", 2e-2)]
)
def test_tolerance_follows_the_precision(precision: Any, tolerance: float) -> None:
    assert Job({}, {"precision": precision}, "", 0, 1, 2, 1).tolerance == tolerance


def test_an_error_that_nobody_foresaw_exits_2(
    app: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("lightning_tp.verify.make_job", broken)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cli.main(["verify", "--config-path", str(app / "settings"), "--config-name", "main"]) == 2
    assert "broken on purpose" in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lightning-tp 0.")
