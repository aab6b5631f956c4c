"""`lightning-tp verify`: the same training steps on one device and under the strategy, compared.

The parent process composes the Hydra config, takes batches from the datamodule and saves them. Two runs, each in a
process of its own, train on them: ``single`` on one device with the global batch, ``parallel`` under the strategy with
each data-parallel rank's part of it. Hooks of the datamodule on single batches (such as ``on_after_batch_transfer``)
run in neither.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import get_class, instantiate
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from torch.utils.data import DataLoader, Dataset

from lightning_tp.callbacks.batch import concatenate
from lightning_tp.callbacks.run_info import data_parallel
from lightning_tp.callbacks.step_recorder import StepRecord, StepRecorder
from lightning_tp.errors import CommandError, ParallelConfigError
from lightning_tp.hydra_errors import check_overrides
from lightning_tp.layout import ParallelLayout

TOLERANCES = {"64-true": 1e-10, "32-true": 1e-5}
COARSE_TOLERANCE = 2e-2
_CONFIG_ERRORS = (HydraException, OmegaConfBaseException, ParallelConfigError)
_LOG_LINES_SHOWN = 40
# What a launcher leaves in the environment. A run that inherits it would take itself for a rank.
_LAUNCH_VARIABLES = ("LOCAL_RANK", "RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Arguments of the Trainer that the two runs do not take from the config: their length, place, output and validation.
_REPLACED_TRAINER_ARGUMENTS = {
    "barebones", "callbacks", "check_val_every_n_epoch", "default_root_dir", "devices", "enable_checkpointing",
    "enable_model_summary", "enable_progress_bar", "fast_dev_run", "limit_train_batches", "limit_val_batches", "logger",
    "max_epochs", "max_steps", "max_time", "min_epochs", "min_steps", "num_nodes", "num_sanity_val_steps",
    "overfit_batches", "profiler", "reload_dataloaders_every_n_epochs", "strategy", "use_distributed_sampler",
    "val_check_interval",
}  # fmt: skip


class VerifyError(CommandError):
    """The comparison could not be made: bad usage, or a run that failed. The message says why."""


@dataclass(frozen=True)
class Job:
    """What both runs train: resolved nodes of the config, and how the batches are to be used."""

    model: dict[str, Any]
    trainer: dict[str, Any]
    strategy: dict[str, Any] | str
    seed: int
    steps: int
    devices: int | list[int]
    data_parallel_size: int

    @property
    def micro_batches(self) -> int:
        return int(self.trainer.get("accumulate_grad_batches") or 1)

    @property
    def batches(self) -> int:
        """Batches of one data-parallel rank that both runs need in all."""
        return self.steps * self.micro_batches * self.data_parallel_size

    @property
    def tolerance(self) -> float:
        precision = str(self.trainer.get("precision") or "32-true")
        return TOLERANCES.get({"64": "64-true", "32": "32-true"}.get(precision, precision), COARSE_TOLERANCE)


@dataclass(frozen=True)
class RunResult:
    """What one run recorded; see :class:`StepRecorder`. ``split_share`` is None without tensor parallelism."""

    steps: list[StepRecord]
    initial_weights: dict[str, str]
    dropout: float
    split_share: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lightning-tp verify`` to ``parser``."""
    add_config_arguments(parser)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps to compare (%(default)s)")
    parser.add_argument(
        "--tolerance", type=float, help="largest relative difference; 1e-10 for 64-true, 1e-5 for 32-true"
    )
    parser.add_argument("--devices", type=int, help="processes of the parallel run (trainer.devices of the config)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that one run may take (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="Hydra overrides, such as strategy=tp")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which Hydra config a command reads."""
    parser.add_argument(
        "--config-path", type=Path, default=Path("conf"), help="folder of the Hydra config (%(default)s)"
    )
    parser.add_argument("--config-name", default="train", help="name of the Hydra config (%(default)s)")


def config_folder(arguments: argparse.Namespace) -> Path:
    """The folder of the Hydra config that ``arguments`` name.

    Raises:
        CommandError: it holds no such config.
    """
    folder: Path = arguments.config_path.resolve()
    if not (folder / f"{arguments.config_name}.yaml").is_file():
        raise CommandError(
            f"there is no {arguments.config_name}.yaml in {folder}. Run this from the folder that holds `conf`, or "
            "give --config-path and --config-name."
        )
    return folder


def verify(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the command. Returns 0 if the runs agree, 1 if not.

    Raises:
        CommandError: bad usage, or a run that failed.
    """
    if arguments.steps < 1:
        raise VerifyError(f"--steps {arguments.steps}: at least one step is needed.")
    folder = config_folder(arguments)
    if arguments.devices is not None:
        overrides = [*overrides, f"++trainer.devices={arguments.devices}"]
    # A Hydra app finds its modules beside its script, which lies beside or above the config, or in the working folder.
    import_paths = [str(folder.parent), os.getcwd()]
    sys.path[:0] = import_paths
    with tempfile.TemporaryDirectory(prefix="lightning-tp-verify-") as work:
        workdir = Path(work)
        with composed(folder, arguments.config_name, overrides, workdir) as config:
            job = make_job(config, arguments.steps)
            save_batches(config, job, workdir)
        tolerance = job.tolerance if arguments.tolerance is None else arguments.tolerance
        single, parallel = run_both(job, workdir, arguments.timeout, import_paths)
    return report(single, parallel, tolerance)


@contextlib.contextmanager
def composed(
    folder: Path, name: str, overrides: Sequence[str], workdir: Path, job_name: str = "verify"
) -> Iterator[DictConfig]:
    """The config as a Hydra app sees it, ``${hydra:...}`` included, for as long as the context lasts."""
    try:
        check_overrides(folder, name, overrides)
        with initialize_config_dir(str(folder), job_name=job_name, version_base="1.3"):
            config = compose(name, overrides=list(overrides), return_hydra_config=True)
    except _CONFIG_ERRORS as error:
        cause = f"\n{error.__cause__}" if error.__cause__ else ""
        raise VerifyError(f"the config does not compose: {error}{cause}") from error
    with open_dict(config.hydra):
        OmegaConf.set_readonly(config.hydra, False)
        config.hydra.runtime.output_dir = str(workdir / "output")
        config.hydra.job.num = 0
    hydra_config = HydraConfig.instance()
    before = hydra_config.cfg
    hydra_config.set_config(config)
    try:
        yield config
    except _CONFIG_ERRORS as error:
        raise VerifyError(str(error)) from error
    finally:
        hydra_config.cfg = before


def make_job(config: DictConfig, steps: int) -> Job:
    """Check the config and resolve what the runs need of it; logger, callbacks and the like may stay unresolved."""
    for key, kind in (("model", "LightningModule"), ("data", "LightningDataModule"), ("trainer", "lightning.Trainer")):
        node = config.get(key)
        if not isinstance(node, DictConfig) or "_target_" not in node:
            raise VerifyError(
                f"the config has no `{key}` with a `_target_`. Verify needs `model`, `data` and `trainer`; add `{key}` "
                f"with the `_target_` of a {kind}, or choose another config with --config-name."
            )
    strategy = _strategy(config)
    devices = config.trainer.get("devices")
    devices = OmegaConf.to_container(devices) if OmegaConf.is_config(devices) else devices
    if not isinstance(devices, list) and str(devices).isdecimal():
        devices = int(str(devices))
    count = len(devices) if isinstance(devices, list) else devices
    if not isinstance(count, int) or count < 1:
        raise VerifyError(f"trainer.devices is {devices!r}, which is no number of processes. Give --devices N.")
    sizes = strategy if isinstance(strategy, dict) else {}
    layout = ParallelLayout.resolve(
        sizes.get("tensor_parallel_size", "auto"), sizes.get("data_parallel_size", "auto"), devices=count, num_nodes=1
    )
    trainer = {name: config.trainer[name] for name in config.trainer if name not in _REPLACED_TRAINER_ARGUMENTS}
    return Job(
        model=_resolved(config.model),
        trainer=_resolved(OmegaConf.create(trainer)),
        strategy=strategy,
        seed=int(config.get("seed") or 0),
        steps=steps,
        devices=devices,
        data_parallel_size=layout.data_parallel_size,
    )


def _strategy(config: DictConfig) -> dict[str, Any] | str:
    from lightning_tp.strategy import TensorParallelStrategy

    node = config.get("strategy")
    where = "strategy" if node is not None else "trainer.strategy"
    node = config.trainer.get("strategy") if node is None else node
    if node == "tensor_parallel":
        return node
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    if target is not None and issubclass(get_class(target), TensorParallelStrategy):
        return _resolved(node)
    found = target or node
    raise VerifyError(
        f"`{where}` is {found!r}, which is not tensor-parallel, so there is nothing to compare. Choose a strategy with "
        "`_target_: lightning_tp.TensorParallelStrategy`, in the recipe with the override strategy=tp."
    )


def _resolved(node: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


def save_batches(config: DictConfig, job: Job, workdir: Path) -> None:
    """Build the datamodule and save the first ``job.batches`` batches of its train dataloader."""
    try:
        pl.seed_everything(job.seed, workers=True)
        datamodule = instantiate(config.data)
        datamodule.prepare_data()
        datamodule.setup("fit")
        loader = CombinedLoader(datamodule.train_dataloader(), "max_size_cycle")
        found = 0
        for (batch, _, _), _ in zip(loader, range(job.batches), strict=False):
            torch.save(batch, workdir / f"batch_{found}.pt")
            found += 1
    except Exception as error:
        raise VerifyError(f"the data could not be loaded:\n{traceback.format_exc()}") from error
    if found < job.batches:
        raise VerifyError(
            f"the train dataloader gave {found} batches, but {job.batches} are needed ({job.steps} steps x "
            f"{job.micro_batches} micro-batches x {job.data_parallel_size} data-parallel ranks). Lower --steps."
        )


def run_both(job: Job, workdir: Path, timeout: float, import_paths: Sequence[str]) -> tuple[RunResult, RunResult]:
    """Train ``job`` on one device and under its strategy, on the batches saved in ``workdir``."""
    torch.save(asdict(job), workdir / "job.pt")
    results = []
    for mode in ("single", "parallel"):
        where = "on one device" if mode == "single" else f"under the strategy on {job.devices} devices"
        print(f"training {job.steps} steps {where} ...", flush=True)
        results.append(_run_process(mode, workdir, timeout, import_paths))
        if len(results[-1].steps) != job.steps:
            raise VerifyError(f"the {mode} run ended after {len(results[-1].steps)} of {job.steps} steps.")
    return results[0], results[1]


def _run_process(mode: str, workdir: Path, timeout: float, import_paths: Sequence[str]) -> RunResult:
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCH_VARIABLES}
    inherited = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join([*import_paths, *inherited])
    log = workdir / f"{mode}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_tp.verify", str(workdir), mode],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # The run's own ranks are in its session; none may outlive it, whatever ended it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status == 0:
        values = json.loads((workdir / f"{mode}.json").read_text())
        return RunResult(**{**values, "steps": [StepRecord(**step) for step in values["steps"]]})
    how = f"did not end within {timeout:g} s (--timeout)" if status is None else f"failed with exit status {status}"
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
    raise VerifyError("\n".join([f"the {mode} run {how}. Its last lines:", *lines]))


def relative_difference(a: float, b: float) -> float:
    """``|a - b| / max(|a|, |b|)``: 0 for two zeros, infinite if either is not a finite number."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), sys.float_info.min)


def report(single: RunResult, parallel: RunResult, tolerance: float) -> int:
    """Print both runs side by side with a verdict. Returns 0 if all differences are within ``tolerance``, else 1."""
    print(
        f"{'step':>5}" + "".join(f"{title:>18}" for title in ("loss, 1 device", "loss, parallel", "difference")), end=""
    )
    print("".join(f"{title:>18}" for title in ("norm, 1 device", "norm, parallel", "difference")))
    largest, place = -1.0, ""
    for number, (a, b) in enumerate(zip(single.steps, parallel.steps, strict=True), start=1):
        line = f"{number:>5}"
        for name in ("loss", "grad_norm"):
            x, y = getattr(a, name), getattr(b, name)
            difference = relative_difference(x, y)
            line += f"{x:>18.10g}{y:>18.10g}{difference:>18.1e}"
            if difference > largest:
                largest, place = difference, f"{name.replace('_', ' ')} of step {number}"
        print(line)
    dropout = max(single.dropout, parallel.dropout)
    if dropout > 0:
        print(f"Dropout (up to p={dropout:g}) was switched off in both runs: its masks differ between them by design.")
    if parallel.split_share is not None:
        print(f"Split over tp: {parallel.split_share:.1%} of the matmul parameters.")
    names = sorted(single.initial_weights.keys() | parallel.initial_weights.keys())
    differing = [name for name in names if single.initial_weights.get(name) != parallel.initial_weights.get(name)]
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        print(f"The runs started from different weights: {differing[0]}{more}.")
    agree = largest <= tolerance
    verdict = "PASS" if agree else "FAIL"
    print(f"{verdict}: the largest relative difference is {largest:.1e} ({place}), the tolerance {tolerance:g}.")
    return 0 if agree else 1


class _SavedBatches(Dataset):
    """The micro-batches of one run: global ones for the single run, those of one data-parallel rank otherwise."""

    def __init__(self, workdir: Path, job: Job, rank: int | None) -> None:
        self.workdir, self.job, self.rank = workdir, job, rank

    def __len__(self) -> int:
        return self.job.steps * self.job.micro_batches

    def __getitem__(self, index: int) -> Any:
        first = index * self.job.data_parallel_size
        if self.rank is not None:
            return self._load(first + self.rank)
        return concatenate([self._load(first + rank) for rank in range(self.job.data_parallel_size)])

    def _load(self, number: int) -> Any:
        return torch.load(self.workdir / f"batch_{number}.pt", weights_only=False)


class _SavedData(pl.LightningDataModule):
    def __init__(self, workdir: Path, job: Job, parallel: bool) -> None:
        super().__init__()
        self.workdir, self.job, self.parallel = workdir, job, parallel

    def train_dataloader(self) -> DataLoader:
        rank = None
        if self.parallel:
            shard = data_parallel(self.trainer)  # type: ignore[arg-type]
            if shard.size != self.job.data_parallel_size:
                raise VerifyError(f"the strategy reads {shard.size} shards, not {self.job.data_parallel_size}.")
            rank = shard.rank
        return DataLoader(_SavedBatches(self.workdir, self.job, rank), batch_size=None, collate_fn=lambda batch: batch)


def train(workdir: Path, mode: str) -> None:
    """Train the job saved in ``workdir``, as ``mode`` "single" or "parallel", and write ``{mode}.json`` beside it."""
    job = Job(**torch.load(workdir / "job.pt", weights_only=False))
    parallel = mode == "parallel"
    pl.seed_everything(job.seed, workers=True)
    model = instantiate(job.model)
    recorder = StepRecorder(seed=job.seed)
    devices = job.devices if parallel else (job.devices[:1] if isinstance(job.devices, list) else 1)
    strategy = "auto"
    if parallel:
        strategy = job.strategy if isinstance(job.strategy, str) else instantiate(job.strategy)
    trainer = instantiate(job.trainer, _partial_=True, _convert_="all")(
        strategy=strategy,
        devices=devices,
        num_nodes=1,
        max_steps=job.steps,
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        callbacks=[recorder],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=workdir,
    )
    trainer.fit(model, datamodule=_SavedData(workdir, job, parallel))
    if trainer.is_global_zero:
        result = RunResult(recorder.records, recorder.initial_weights, recorder.dropout, recorder.split_share)
        (workdir / f"{mode}.json").write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    import lightning_tp  # noqa: F401  (registers the strategy string)

    train(Path(sys.argv[1]), sys.argv[2])
