"""What the engine must reach: ratios of step times of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.engine.megatron import HandWritten
from benchmarks.engine.one_process import OneProcess
from benchmarks.engine.ours import LightningTP
from benchmarks.engine.torch_parallelize import TorchParallelize
from benchmarks.engine.transformers_llama import TransformersTensorParallel


@dataclass(frozen=True)
class Target:
    """The step time of lightning_tp over that of another peer, at one hidden size, is at most ``limit``."""

    hidden_size: int
    to: str
    limit: float


@dataclass(frozen=True)
class Outcome:
    """A target and the ratio that was measured."""

    target: Target
    ratio: float

    @property
    def holds(self) -> bool:
        return self.ratio <= self.target.limit


TARGETS = (
    Target(128, HandWritten.name, 1.08),
    Target(512, HandWritten.name, 1.02),
    Target(1024, HandWritten.name, 1.02),
    Target(512, OneProcess.name, 0.57),
    Target(1024, OneProcess.name, 0.55),
    *(
        Target(size, peer.name, 1.0)
        for size in (128, 512, 1024)
        for peer in (TorchParallelize, TransformersTensorParallel)
    ),
)


def outcomes(step_times: Mapping[int, Mapping[str, float]]) -> list[Outcome]:
    """The targets of which both sides were timed.

    Args:
        step_times: Seconds by hidden size and name of the peer.
    """
    found = []
    for target in TARGETS:
        times = step_times.get(target.hidden_size, {})
        if LightningTP.name in times and target.to in times:
            found.append(Outcome(target, times[LightningTP.name] / times[target.to]))
    return found
