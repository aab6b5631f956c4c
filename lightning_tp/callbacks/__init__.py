"""Callbacks that measure a run and report it. All of them work under any Lightning strategy."""

from lightning_tp.callbacks.closing_report import ClosingReport
from lightning_tp.callbacks.collectives import CollectiveCount, CollectiveCounter
from lightning_tp.callbacks.memory import MemoryMonitor
from lightning_tp.callbacks.parallel_logger import ParallelLogger
from lightning_tp.callbacks.throughput import Throughput, ThroughputAverages

__all__ = [
    "ClosingReport",
    "CollectiveCount",
    "CollectiveCounter",
    "MemoryMonitor",
    "ParallelLogger",
    "Throughput",
    "ThroughputAverages",
]
