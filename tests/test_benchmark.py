"""Everything that the engine is compared with computes what it computes, and the comparison is written down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch._C._profiler import _EventType

from benchmarks.engine import PEERS
from benchmarks.engine.__main__ import main
from benchmarks.engine.megatron import HandWritten, ShardedFeedForward
from benchmarks.engine.one_process import OneProcess
from benchmarks.engine.ours import LightningTP
from benchmarks.engine.report import figures, markdown
from benchmarks.engine.run import TOLERANCE, Result, measure
from benchmarks.engine.setting import Setting
from benchmarks.engine.targets import TARGETS, outcomes
from benchmarks.engine.time_spent import (
    ATTENTION,
    BETWEEN,
    COLLECTIVES,
    KINDS,
    OPTIMIZER,
    OTHER,
    PRODUCTS,
    time_by_kind,
)
from benchmarks.engine.torch_parallelize import TorchParallelize
from benchmarks.engine.transformers_llama import TransformersTensorParallel
from benchmarks.engine.usage import measure_usage
from lightning_tp.testing import RankPool

TINY = Setting(hidden_size=128, batch=2, sequence=16, layers=2)
EAGER = [name for name in PEERS if "compiled" not in name]


@pytest.fixture(scope="module")
def results(ranks2: RankPool) -> dict[str, Result]:
    return {result.peer: result for result in ranks2.run(measure, TINY, EAGER, 1)[0]}


def test_every_peer_computes_what_one_process_computes(results: dict[str, Result]) -> None:
    assert list(results) == EAGER
    for result in results.values():
        assert not result.failure or not PEERS[result.peer].required, result
        if not result.failure:
            assert result.difference < 1e-5 and len(result.seconds) == 1 and result.seconds[0] > 0


def test_collectives_are_those_of_the_method(results: dict[str, Result]) -> None:
    activations = TINY.tokens_per_step * TINY.hidden_size * 4
    for peer in (HandWritten, TorchParallelize, LightningTP):
        for usage in results[peer.name].usage:
            assert list(usage.collectives) == ["all_reduce"]
            count = usage.collectives["all_reduce"]
            assert (count.calls, count.bytes) == (4 * TINY.layers, 4 * TINY.layers * activations)
    assert len(results[OneProcess.name].usage) == 1
    assert not results[OneProcess.name].usage[0].collectives


def test_held_memory_is_parameters_and_two_moments(results: dict[str, Result]) -> None:
    parameters = list(TINY.model().parameters())
    whole = sum(parameter.numel() for parameter in parameters)
    split = sum(p.numel() for name, p in TINY.model().named_parameters() if "_proj" in name)
    tables = sum(buffer.numel() for buffer in TINY.model().buffers())
    for name, elements in ((OneProcess.name, whole), (HandWritten.name, whole - split / 2)):
        steps = len(parameters)  # a count in the state of each
        assert results[name].usage[0].held_bytes == 4 * (3 * elements + tables + steps)
    ours, by_hand = results[LightningTP.name].usage[0], results[HandWritten.name].usage[0]
    assert ours.held_bytes == by_hand.held_bytes


def test_float64_is_equal_to_rounding(ranks2: RankPool) -> None:
    names = [
        OneProcess.name,
        HandWritten.name,
        TorchParallelize.name,
        LightningTP.name,
        TransformersTensorParallel.name,
    ]
    double = Setting(hidden_size=128, batch=2, sequence=8, layers=1, double=True)
    *exact, transformers = ranks2.run(measure, double, names, 1)[0]
    assert TOLERANCE[double.dtype] == 1e-10
    assert not any(result.failure for result in exact)
    assert transformers.failure == "computes in float32"


def _wrong_feed_forward(setting: Setting) -> list[Result]:
    forward = ShardedFeedForward.forward
    ShardedFeedForward.forward = lambda self, x: forward(self, x) * 1.01
    try:
        return measure(setting, [OneProcess.name, HandWritten.name, LightningTP.name], 1)
    finally:
        ShardedFeedForward.forward = forward


def test_a_peer_that_computes_something_else_is_not_timed(ranks2: RankPool) -> None:
    by_hand = ranks2.run(_wrong_feed_forward, TINY)[0][1]
    assert by_hand.failure.startswith("computes something else")
    assert not by_hand.seconds and not by_hand.usage


def test_peak_memory_counts_what_lives_at_one_time() -> None:
    held = torch.zeros(1000)

    def step() -> None:
        first = held + held  # 4000 bytes
        second = first[:500] + first[500:]  # 2000 more
        del first, second
        held[:900].cos()

    usage = measure_usage(step, [held, held[10:]])
    assert (usage.held_bytes, usage.peak_bytes) == (4000, 10_000)


def test_time_of_a_step_is_divided_up(results: dict[str, Result]) -> None:
    for result in results.values():
        for usage in result.usage:
            assert list(usage.seconds) == list(KINDS)
            assert all(seconds >= 0 for seconds in usage.seconds.values())
            assert usage.seconds[PRODUCTS] > 0 and usage.seconds[ATTENTION] > 0 and usage.seconds[OPTIMIZER] > 0
            assert (usage.seconds[COLLECTIVES] > 0) is (len(result.usage) > 1)


@dataclass
class Event:
    name: str
    start_time_ns: int
    duration_time_ns: int
    start_tid: int = 1
    children: Sequence[Event] = ()
    tag: _EventType = _EventType.TorchOp


def test_collectives_count_where_nothing_is_computed() -> None:
    product = Event("aten::linear", 100, 50, children=[Event("aten::mm", 110, 30)])
    overlapped = [Event("c10d::allreduce_", 140, 5), Event("gloo:all_reduce", 145, 55, start_tid=2)]
    inside = Event("aten::copy_", 150, 10, start_tid=2)
    add = Event("autograd::engine::evaluate_function", 160, 40, children=[Event("aten::add", 170, 20)])
    times = time_by_kind([product, *overlapped, inside, add], 90, 220)
    # From 140 to 200 it is on its way, and from 170 to 190 something is added.
    assert {kind: round(seconds * 1e9) for kind, seconds in times.items()} == {
        PRODUCTS: 30,
        ATTENTION: 0,
        OTHER: 20,
        OPTIMIZER: 0,
        COLLECTIVES: 40,
        BETWEEN: 40,
    }


def test_targets_are_ratios_of_the_fastest_steps() -> None:
    times = {LightningTP.name: 1.0, HandWritten.name: 0.99, OneProcess.name: 1.7}
    found = {(outcome.target.to, outcome.target.hidden_size): outcome for outcome in outcomes({512: times, 64: times})}
    assert set(found) == {(HandWritten.name, 512), (OneProcess.name, 512)}
    assert found[HandWritten.name, 512].holds
    assert not found[OneProcess.name, 512].holds and found[OneProcess.name, 512].ratio == pytest.approx(1 / 1.7)
    assert {target.hidden_size for target in TARGETS} == {128, 512, 1024}


def test_report_has_a_row_for_every_peer_and_its_figures(results: dict[str, Result]) -> None:
    entries = {TINY.hidden_size: list(results.values())}
    page = markdown([TINY], entries, 2)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for name in EAGER:
        (row,) = (row for row in rows if row.startswith(f"| {name} | ") and row.count("|") == 10)
        assert row.endswith(" | | | | | | | |") or f"{TINY.tokens_per_step / min(results[name].seconds):,.0f}" in row
    assert "8 all_reduce (0.1 MiB)" in page
    assert f"| {HandWritten.name} | 128 | 1.08 |" in page
    (written,) = json.loads(json.dumps(figures([TINY], entries, 2)))["settings"]
    assert written["setting"]["hidden_size"] == 128
    assert [result["peer"] for result in written["results"]] == EAGER


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden", "192"], "--hidden 192 is no multiple of 128"),
        (["--batch", "3"], "--batch 3 is no multiple of the 2 ranks"),
        (["--repeats", "1", "2"], "--repeats has 2 numbers for 3 hidden sizes"),
        (["--only", "megatron"], "unknown implementation 'megatron'; there are: one process, 1 thread; "),
    ],
)
def test_bad_options_are_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks.engine", *options])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err


def test_command_writes_page_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, file = tmp_path / "page.md", tmp_path / "figures.json"
    options = ["--hidden", "128", "--repeats", "1", "--batch", "2", "--sequence", "8", "--only", LightningTP.name]
    monkeypatch.setattr("sys.argv", ["benchmarks.engine", *options, "--output", str(page), "--json", str(file)])
    assert main() == 0
    assert f"| {LightningTP.name} | " in page.read_text()
    assert json.loads(file.read_text())["ranks"] == 2
    assert f"| {OneProcess.name} | " in capsys.readouterr().out
