"""The callbacks measure what they say, and leave nothing behind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader

from lightning_tp.callbacks import (
    ClosingReport,
    CollectiveCount,
    CollectiveCounter,
    MemoryMonitor,
    ParallelLogger,
    Throughput,
)
from lightning_tp.callbacks import throughput as throughput_module
from lightning_tp.callbacks.batch import concatenate, sample_count, token_count
from lightning_tp.callbacks.closing_report import write_json
from lightning_tp.callbacks.collectives import _KINDS
from lightning_tp.callbacks.step_recorder import StepRecorder, grad_norm
from lightning_tp.dropout import DropoutOff
from lightning_tp.layout import ParallelLayout
from lightning_tp.testing import RankPool

BATCH, SEQUENCE, WIDTH = 4, 6, 8


class TinyModule(pl.LightningModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, 16)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.head(self.dropout(self.embedding(batch["ids"])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["ids"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches(count: int) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    data = [
        {"weight": torch.ones(BATCH), "ids": torch.randint(16, (BATCH, SEQUENCE), generator=generator)}
        for _ in range(count)
    ]
    return DataLoader(data, batch_size=None)


def make_trainer(root: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "log_every_n_steps": 2, "logger": False} | options
    return pl.Trainer(
        default_root_dir=root,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )


# ---- batches


def test_tokens_are_the_elements_of_the_first_integer_tensor_of_two_dims() -> None:
    ids = torch.zeros(3, 5, dtype=torch.int64)
    batch = {"lengths": torch.zeros(3, dtype=torch.int64), "mask": ids.bool(), "x": ids.float(), "ids": [ids, ids[:1]]}
    assert token_count(batch) == 15
    assert sample_count(batch) == 3
    assert token_count([ids.float()]) is None
    assert sample_count([torch.tensor(1.0)]) is None


def test_batches_are_joined_along_dim_0() -> None:
    def batch(value: int) -> dict[str, Any]:
        return {
            "x": torch.full((2, 3), value),
            "pair": (torch.full((2,), value), 7),
            "names": [f"{value}a", f"{value}b"],
        }

    joined = concatenate([batch(1), batch(2)])
    assert joined["x"].tolist() == [[1] * 3] * 2 + [[2] * 3] * 2
    assert joined["pair"][0].tolist() == [1, 1, 2, 2]
    assert joined["pair"][1] == 7
    assert joined["names"] == ["1a", "1b", "2a", "2b"]


def test_batches_of_different_sizes_are_not_joined() -> None:
    with pytest.raises(ValueError, match=r"sizes \[2, 1\].*drop_last"):
        concatenate([torch.zeros(2), torch.zeros(1)])
    with pytest.raises(ValueError, match="int differ"):
        concatenate([(torch.zeros(2), 1), (torch.zeros(2), 2)])


# ---- throughput


class Clock:
    """A clock that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(throughput_module, "_now", lambda device: self.seconds)


class TimedModule(TinyModule):
    """The first two training steps take 100 s, the others 1 s; a validation batch takes 50 s."""

    def __init__(self, clock: Clock, first: float = 100.0) -> None:
        super().__init__()
        self.clock, self.first = clock, first

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.clock.seconds += self.first if batch_idx < 2 else 1.0
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.clock.seconds += 50.0
        super().validation_step(batch, batch_idx)


def test_throughput_leaves_out_warmup_and_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    throughput = Throughput()
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(tmp_path, throughput, logger=logger, val_check_interval=3)
    trainer.fit(TimedModule(Clock(monkeypatch)), batches(8), batches(1))
    averages = throughput.averages
    assert averages is not None
    assert averages.steps == 6
    assert averages.step_time == 1.0
    assert averages.samples_per_second == BATCH
    assert averages.tokens_per_second == BATCH * SEQUENCE
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("perf/tokens_per_second")
    logged = [row.split(",")[column] for row in rows[1:]]
    assert [float(value) for value in logged if value] == [BATCH * SEQUENCE] * 3


def test_throughput_counts_all_micro_batches_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    throughput = Throughput(warmup=1)
    trainer = make_trainer(tmp_path, throughput, accumulate_grad_batches=2, log_every_n_steps=1)
    trainer.fit(TimedModule(Clock(monkeypatch)), batches(8))
    averages = throughput.averages
    assert averages is not None
    assert (averages.steps, averages.step_time, averages.samples_per_second) == (3, 2.0, BATCH)


def test_throughput_is_none_when_nothing_follows_the_warmup(tmp_path: Path) -> None:
    throughput = Throughput(warmup=4)
    make_trainer(tmp_path, throughput).fit(TinyModule(), batches(4))
    assert throughput.averages is None


def ddp_throughput(folder: Path) -> float:
    throughput = Throughput()
    trainer = make_trainer(folder, throughput, strategy="ddp", devices=2, use_distributed_sampler=False)
    with pytest.MonkeyPatch.context() as patch:
        trainer.fit(TimedModule(Clock(patch)), batches(4))
    assert throughput.averages is not None and throughput.averages.samples_per_second is not None
    return throughput.averages.samples_per_second


def test_throughput_counts_every_data_parallel_rank(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(ddp_throughput, tmp_path) == [2 * BATCH, 2 * BATCH]


# ---- memory


def test_memory_of_one_process_grows_with_what_it_allocates(tmp_path: Path) -> None:
    before = MemoryMonitor()
    make_trainer(tmp_path, before).fit(TinyModule(), batches(2))
    # Above the peak of whatever ran before in this process.
    ballast = torch.ones(before.peaks[0] // 4, dtype=torch.float32)
    after = MemoryMonitor()
    make_trainer(tmp_path, after).fit(TinyModule(), batches(2))
    assert len(before.peaks) == len(after.peaks) == 1
    assert 100 * 2**20 < before.peaks[0] < after.peaks[0]
    assert ballast.sum() > 0


def ddp_memory(folder: Path) -> tuple[list[int], dict[str, Tensor]]:
    monitor = MemoryMonitor()
    ballast = torch.ones(dist.get_rank() * 100 * 2**20, dtype=torch.uint8)
    trainer = make_trainer(folder, monitor, strategy="ddp", devices=2, use_distributed_sampler=False)
    trainer.fit(TinyModule(), batches(2))
    assert ballast.numel() == trainer.global_rank * 100 * 2**20
    return monitor.peaks, dict(trainer.callback_metrics)


def test_memory_of_every_rank_is_known_on_all(ranks2: RankPool, tmp_path: Path) -> None:
    (peaks, metrics), (peaks_of_one, _) = ranks2.run(ddp_memory, tmp_path)
    assert peaks == peaks_of_one
    assert peaks[1] - peaks[0] > 50 * 2**20
    assert metrics["memory/rank_1_peak_gib"] > metrics["memory/rank_0_peak_gib"] > 0


# ---- collectives


class HandMadeCollectives(TinyModule):
    """Two all-reduces of 8 float32 and one all-gather of 2 x 3 int64 in each training step, two more in hooks."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        for _ in range(2):
            dist.all_reduce(torch.ones(8))
        dist.all_gather_single(torch.empty(6, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        dist.all_reduce(torch.ones(1))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        dist.all_reduce(torch.ones(1))


class NoisyCallback(pl.Callback):
    """Runs a collective in every hook around a step."""

    def on_train_batch_start(self, *args: Any) -> None:
        dist.all_reduce(torch.ones(1))

    on_before_zero_grad = on_before_backward = on_after_backward = on_before_optimizer_step = on_train_batch_start
    on_train_batch_end = on_train_batch_start


def counted(folder: Path) -> dict[str, dict[str, CollectiveCount]]:
    results = {}
    for name, module, accumulate in (
        ("ddp", TinyModule(), 1),
        ("hand-made", HandMadeCollectives(), 1),
        ("accumulated", HandMadeCollectives(), 2),
    ):
        counter = CollectiveCounter()
        trainer = make_trainer(
            folder,
            NoisyCallback(),
            counter,
            NoisyCallback(),
            MemoryMonitor(),
            strategy="ddp",
            devices=2,
            accumulate_grad_batches=accumulate,
            use_distributed_sampler=False,
            log_every_n_steps=1,
        )
        trainer.fit(module, batches(6))
        assert counter.measured
        assert not _get_current_dispatch_mode_stack()
        results[name] = counter.counts
    return results


def test_collectives_of_one_step_are_counted_exactly(ranks2: RankPool, tmp_path: Path) -> None:
    by_rank = ranks2.run(counted, tmp_path)
    assert by_rank[0] == by_rank[1]
    counts = by_rank[0]
    size = 4 * sum(parameter.numel() for parameter in TinyModule().parameters())
    assert counts["ddp"] == {"all_reduce": CollectiveCount(1, size)}
    assert counts["hand-made"] == {
        "all_reduce": CollectiveCount(3, size + 2 * 32),
        "all_gather": CollectiveCount(1, 48),
    }
    assert counts["accumulated"] == {
        "all_reduce": CollectiveCount(5, size + 4 * 32),
        "all_gather": CollectiveCount(2, 96),
    }


def test_every_collective_operator_of_torch_has_a_kind() -> None:
    schemas = {schema.name for schema in torch._C._jit_get_all_schemas()}
    operators = {name for name in schemas if name.startswith(("c10d::", "_c10d_functional::"))}
    known = {f"{namespace}::{name}" for namespace, kinds in _KINDS.items() for name in kinds}
    assert operators - known == {
        "_c10d_functional::_wrap_tensor_autograd",
        "_c10d_functional::wait_tensor",
        "c10d::check_for_nan",
    }


def test_counter_is_not_measured_in_a_run_that_is_too_short(tmp_path: Path) -> None:
    counter = CollectiveCounter(step=3)
    make_trainer(tmp_path, counter).fit(TinyModule(), batches(2))
    assert not counter.measured
    assert counter.counts == {}


def test_no_mode_stays_after_an_exception(tmp_path: Path) -> None:
    class Failing(TinyModule):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            assert len(_get_current_dispatch_mode_stack()) == 1
            raise RuntimeError("broken on purpose")

    recorder = StepRecorder(seed=0)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        make_trainer(tmp_path, CollectiveCounter(step=1), recorder).fit(Failing(), batches(2))
    assert not _get_current_dispatch_mode_stack()
    assert torch.overrides._get_current_function_mode_stack() == []


# ---- loggers and the report


class FakePlan:
    def to_dict(self) -> dict[str, Any]:
        return {"regions": [{"column": ["up"], "row": ["down"]}]}

    def describe(self) -> str:
        return "up column, down row"


class FakeTensorParallelStrategy(pl.strategies.SingleDeviceStrategy):
    """One device that says it is one of two tensor-parallel ranks."""

    layout = ParallelLayout(data_parallel_size=1, tensor_parallel_size=2)
    plan = FakePlan()

    def parameter_summary(self) -> Any:
        from lightning_tp.callbacks.run_info import ParameterCount

        return ParameterCount(total=1000, per_rank=600, split=800, split_share=0.9)


def test_layout_and_plan_reach_the_logger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    strategy = FakeTensorParallelStrategy(device="cpu")
    make_trainer(tmp_path, ParallelLogger(), logger=logger, strategy=strategy).fit(TinyModule(), batches(2))
    logged = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    assert logged["parallel/tensor_parallel_size"] == 2
    assert logged["parallel/data_parallel_size"] == 1
    assert logged["parallel/parameters"] == 1000
    assert logged["parallel/parameters_per_rank"] == 600
    assert logged["parallel_plan"] == FakePlan().to_dict()


def test_only_the_world_size_is_logged_under_other_strategies(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    make_trainer(tmp_path, ParallelLogger(), logger=logger).fit(TinyModule(), batches(2))
    assert yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text()) == {"parallel/world_size": 1}


def test_wandb_gets_plan_and_layout_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    report = ClosingReport()
    strategy = FakeTensorParallelStrategy(device="cpu")
    trainer = make_trainer(tmp_path, ParallelLogger(), report, logger=logger, strategy=strategy)
    trainer.fit(TinyModule(), batches(2))
    config = dict(logger.experiment.config)
    paths = json.loads((tmp_path / "report.json").read_text())["paths"]
    summary = logger.experiment.summary["parallel/plan"]
    logger.experiment.finish()
    assert config["parallel/tensor_parallel_size"] == 2
    assert config["parallel_plan"] == FakePlan().to_dict()
    assert summary == "up column, down row"
    assert Path(paths["WandbLogger"]).name.startswith("offline-run-")


def test_report_tells_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path, ClosingReport(), logger=CSVLogger(tmp_path), log_every_n_steps=1)
    trainer.fit(TinyModule(), batches(6), batches(2))
    report = json.loads((tmp_path / "report.json").read_text())
    printed = capsys.readouterr().out
    parameters = sum(parameter.numel() for parameter in TinyModule().parameters())
    metrics = trainer.callback_metrics
    assert report["train_loss"] == float(metrics["train/loss"])
    assert report["validation_loss"] == float(metrics["val/loss"])
    assert report["parameters"] == {"total": parameters, "per_rank": parameters, "split": 0, "split_share": 0.0}
    assert report["throughput"]["steps"] == 4
    speed = report["throughput"]
    assert speed["tokens_per_second"] == pytest.approx(BATCH * SEQUENCE / speed["step_time"])
    assert report["collectives"] == {}
    assert len(report["peak_memory"]) == 1
    assert Path(report["paths"]["metrics"]).is_file()
    assert f"{report['validation_loss']:.4f}" in printed
    assert f"{parameters:,}" in printed
    assert f"report: {tmp_path / 'report.json'}" in printed


def test_report_says_what_was_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(tmp_path, ClosingReport()).fit(TinyModule(), batches(2))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["throughput"] is None
    assert report["validation_loss"] is None
    assert report["collectives"] is None
    printed = capsys.readouterr().out
    for row in ("validation loss", "tokens per second", "collectives per step"):
        assert any(row in line and "not measured" in line for line in printed.splitlines())


def test_report_uses_the_callbacks_that_are_there(tmp_path: Path) -> None:
    counter = CollectiveCounter(step=1)
    trainer = make_trainer(tmp_path, counter, ClosingReport())
    trainer.fit(TinyModule(), batches(2))
    assert [callback for callback in trainer.callbacks if isinstance(callback, CollectiveCounter)] == [counter]
    assert json.loads((tmp_path / "report.json").read_text())["collectives"] == {}


def test_a_report_is_written_whole_and_is_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    write_json(path, {"loss": float("nan"), "memory": [1, float("inf")]})
    assert json.loads(path.read_text()) == {"loss": "nan", "memory": [1, "inf"]}
    with pytest.raises(TypeError):
        write_json(path, {"loss": object()})
    assert json.loads(path.read_text())["loss"] == "nan"
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


# ---- recorder


def test_recorded_norm_is_that_of_torch_before_clipping(tmp_path: Path) -> None:
    norms = []

    class Clipped(TinyModule):
        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **_: Any) -> None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 1e-3)))

    recorder = StepRecorder(seed=0)
    make_trainer(tmp_path, recorder, precision="64-true").fit(Clipped(), batches(3))
    assert [step.grad_norm for step in recorder.records] == pytest.approx(norms, rel=1e-14)
    assert min(norms) > 1e-2


def test_recorded_loss_is_the_mean_of_the_micro_batches(tmp_path: Path) -> None:
    model = TinyModule().double()
    data = batches(2)
    expected = sum(float(model.loss(batch)) for batch in data) / 2
    recorder = StepRecorder(seed=0)
    make_trainer(tmp_path, recorder, accumulate_grad_batches=2, precision="64-true").fit(model, data)
    assert [step.loss for step in recorder.records] == pytest.approx([expected], rel=1e-14)


def test_recorder_switches_dropout_off(tmp_path: Path) -> None:
    losses = []
    for dropout in (0.0, 0.5):
        torch.manual_seed(0)
        recorder = StepRecorder(seed=0)
        make_trainer(tmp_path, recorder).fit(TinyModule(dropout), batches(3))
        assert recorder.dropout == dropout
        losses.append([step.loss for step in recorder.records])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.5),
        nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.5, batch_first=True),
        nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True),
        nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5),
    ],
)
def test_dropout_off_covers_modules(module: nn.Module) -> None:
    x = torch.randn(2, 4, WIDTH)
    inputs = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)

    def run() -> Tensor:
        output = module(*inputs)
        return output[0] if isinstance(output, tuple) else output

    assert not torch.equal(run(), run())
    with DropoutOff() as mode:
        assert torch.equal(run(), run())
    assert mode.largest_probability == 0.5


def test_grad_norm_skips_parameters_without_gradient() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    parameters[0].grad = torch.tensor([3.0, 4.0])
    assert grad_norm(torch.optim.SGD(parameters, lr=1.0)) == 5.0


def test_fits_run_one_after_the_other_with_the_same_callbacks(tmp_path: Path) -> None:
    throughput, counter = Throughput(), CollectiveCounter(step=1)
    start = time.perf_counter()
    for _ in range(2):
        trainer = make_trainer(tmp_path, throughput, counter)
        trainer.fit(TinyModule(), batches(4))
        assert counter.measured
        assert throughput.averages is not None
        assert throughput.averages.steps == 2
    assert throughput.averages.step_time < time.perf_counter() - start
