"""The table at the end of a run, and the same values in ``report.json``."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from rich.console import Console
from rich.table import Table

from lightning_tp.callbacks.collectives import CollectiveCount, CollectiveCounter
from lightning_tp.callbacks.memory import GIB, MemoryMonitor
from lightning_tp.callbacks.run_info import ParameterCount, callbacks_of, count_parameters, find_callback
from lightning_tp.callbacks.throughput import Throughput, ThroughputAverages

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class RunReport:
    """What a fit came to. None stands for what was not measured.

    ``collectives`` are those of one training step by kind, ``peak_memory`` is in bytes by rank, and ``paths`` maps
    what was written to where it lies.
    """

    train_loss: float | None
    validation_loss: float | None
    throughput: ThroughputAverages | None
    parameters: ParameterCount | None
    collectives: dict[str, CollectiveCount] | None
    peak_memory: list[int]
    paths: dict[str, str]


class ClosingReport(pl.Callback):
    """Prints one table at the end of a fit and writes it to ``report.json`` in the Trainer's ``default_root_dir``.

    It reads the other callbacks of this package and adds those that the Trainer does not have. Only rank zero
    prints and writes.

    Args:
        train_loss: Name of the logged metric that is the training loss.
        validation_loss: Name of the logged metric that is the validation loss.
    """

    def __init__(self, train_loss: str = "train/loss", validation_loss: str = "val/loss") -> None:
        self.train_loss = train_loss
        self.validation_loss = validation_loss
        self._parameters: ParameterCount | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        missing = [
            kind() for kind in (Throughput, MemoryMonitor, CollectiveCounter) if find_callback(trainer, kind) is None
        ]
        # A new list, put before this callback: Lightning iterates over the old one now, and wants checkpoints last.
        present = callbacks_of(trainer)
        place = present.index(self)
        trainer.callbacks = [*present[:place], *missing, *present[place:]]  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Counted here, because `on_fit_end` comes after the strategy's teardown.
        self._parameters = count_parameters(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        report = self._collect(trainer)
        path = Path(trainer.default_root_dir) / "report.json"
        write_json(path, asdict(report))
        report.paths["report"] = str(path)
        progress_bar = find_callback(trainer, ProgressBar)
        if progress_bar is not None:
            # A live progress bar would redraw itself over the table. Nothing trains any more, so it may end now.
            progress_bar.teardown(trainer, pl_module, "fit")
        Console().print(table(report))
        # Paths are printed whole, one a line, so that they can be copied: a table would cut or wrap them.
        for name, value in report.paths.items():
            print(f"{name}: {value}")

    def _collect(self, trainer: pl.Trainer) -> RunReport:
        throughput = find_callback(trainer, Throughput)
        memory = find_callback(trainer, MemoryMonitor)
        counter = find_callback(trainer, CollectiveCounter)
        assert throughput is not None and memory is not None and counter is not None  # added in `setup`
        return RunReport(
            train_loss=_metric(trainer, self.train_loss),
            validation_loss=_metric(trainer, self.validation_loss),
            throughput=throughput.averages,
            parameters=self._parameters,
            collectives=counter.counts if counter.measured else None,
            peak_memory=memory.peaks,
            paths=_paths(trainer),
        )


def table(report: RunReport) -> Table:
    """The report as a table of two columns."""
    rows = Table(title="Run report", show_header=False)
    rows.add_row("train loss", _cell(report, "train_loss", ".4f"))
    rows.add_row("validation loss", _cell(report, "validation_loss", ".4f"))
    rows.add_row("step time", _cell(report.throughput, "step_time", ".4f", " s"))
    rows.add_row("samples per second", _cell(report.throughput, "samples_per_second", ",.1f"))
    rows.add_row("tokens per second", _cell(report.throughput, "tokens_per_second", ",.0f"))
    rows.add_row("parameters in all", _cell(report.parameters, "total", ","))
    rows.add_row("parameters per rank", _cell(report.parameters, "per_rank", ","))
    rows.add_row("parameters split over tp", _cell(report.parameters, "split", ","))
    rows.add_row("split share of matmul parameters", _cell(report.parameters, "split_share", ".1%"))
    for kind, count in _collective_rows(report.collectives).items():
        rows.add_row(kind, count)
    for rank, peak in enumerate(report.peak_memory):
        rows.add_row(f"peak memory, rank {rank}", f"{peak / GIB:.2f} GiB")
    return rows


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write ``values`` to ``path`` so that a reader sees the old file or the whole new one, never a part.

    Numbers that are not finite have no form in JSON and are written as text, such as "nan".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(_finite(values), indent=2, allow_nan=False) + "\n")
    os.replace(temporary, path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _cell(values: object, name: str, spec: str, unit: str = "") -> str:
    """The formatted attribute ``name`` of ``values``, either of which may be None."""
    value = None if values is None else getattr(values, name)
    return NOT_MEASURED if value is None else f"{value:{spec}}{unit}"


def _collective_rows(collectives: dict[str, CollectiveCount] | None) -> dict[str, str]:
    if collectives is None:
        return {"collectives per step": NOT_MEASURED}
    if not collectives:
        return {"collectives per step": "none"}
    return {
        f"{kind} per step": f"{count.calls} ({count.bytes / 2**20:,.2f} MiB)"
        for kind, count in sorted(collectives.items())
    }


def _metric(trainer: pl.Trainer, name: str) -> float | None:
    value = trainer.callback_metrics.get(name)
    return None if value is None else float(value)


def _paths(trainer: pl.Trainer) -> dict[str, str]:
    """What the run wrote, where it exists."""
    paths: dict[str, str | None] = {}
    checkpoints = [callback for callback in callbacks_of(trainer) if isinstance(callback, ModelCheckpoint)]
    for number, checkpoint in enumerate(checkpoints):
        suffix = f" {number + 1}" if len(checkpoints) > 1 else ""
        paths[f"best checkpoint{suffix}"] = checkpoint.best_model_path
        paths[f"last checkpoint{suffix}"] = checkpoint.last_model_path
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            paths["metrics"] = str(Path(logger.log_dir) / "metrics.csv")
        elif isinstance(logger, WandbLogger):
            paths["WandbLogger"] = str(Path(logger.experiment.dir).parent)
        else:
            paths[type(logger).__name__] = logger.log_dir
    if HydraConfig.initialized():
        paths["hydra run"] = HydraConfig.get().runtime.output_dir
    return {name: path for name, path in paths.items() if path and Path(path).exists()}
