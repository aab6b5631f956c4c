"""Build the peers on every rank, check that they compute the same, and time their steps in turns."""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.engine import PEERS
from benchmarks.engine.one_process import OneProcess
from benchmarks.engine.peer import Peer, Unavailable
from benchmarks.engine.setting import Setting
from benchmarks.engine.usage import Usage, measure_usage

CHECKED_STEPS = 3
PROFILED_STEPS = 3
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
"""Largest relative difference of losses and of the first gradients' norm from one process."""


@dataclass(frozen=True)
class Numbers:
    """What a peer has computed: the losses of its first steps, and the norm of the first gradients."""

    losses: tuple[float, ...]
    gradient_norm: float

    def difference(self, other: Numbers) -> float:
        """The largest relative difference."""
        pairs = [*zip(self.losses, other.losses, strict=True), (self.gradient_norm, other.gradient_norm)]
        return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


@dataclass(frozen=True)
class Result:
    """What one peer has given in one setting.

    Attributes:
        failure: Why it was not timed; empty if it was.
        difference: Of its numbers from those of one process.
        seconds: Of each timed step, of the slowest rank.
        usage: Of each rank that takes part.
    """

    peer: str
    failure: str = ""
    difference: float = 0.0
    seconds: tuple[float, ...] = ()
    usage: tuple[Usage, ...] = ()


def measure(setting: Setting, names: list[str], repeats: int) -> list[Result]:
    """All peers in ``names`` in one setting. Runs on every rank of a pool; every rank has the results.

    Each peer is built, checked against one process by the losses of its first steps and by the norm of all gradients,
    and kept. Then each round has one step of each peer, so that what disturbs the machine disturbs all.
    """
    quiet()
    torch.set_num_threads(1)
    reference = _numbers(OneProcess(setting)) if dist.get_rank() == 0 else None
    peers: list[Peer | None] = []
    results: dict[str, Result] = {}
    for name in names:
        peer, failure, difference = _build(PEERS[name], setting, reference)
        peers.append(peer)
        results[name] = Result(name, failure, difference)
        gc.collect()
    running = [name for name in names if not results[name].failure]
    by_name = dict(zip(names, peers, strict=True))
    seconds = _rounds({name: by_name[name] for name in running}, repeats)
    for name in running:
        results[name] = Result(
            name, "", results[name].difference, tuple(seconds[name]), _usage(by_name[name], PEERS[name].alone)
        )
    return list(results.values())


def quiet() -> None:
    """Warnings of libraries say nothing about the figures."""
    warnings.filterwarnings("ignore")
    for name in ("transformers", "DeepSpeed", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _build(kind: type[Peer], setting: Setting, reference: Numbers | None) -> tuple[Peer | None, str, float]:
    """The peer on the ranks that it uses; why it cannot be timed, if so; its difference from ``reference``."""
    peer: Peer | None = None
    failure, difference = "", 0.0
    if setting.double and not kind.float64:
        return None, "computes in float32", difference
    if not kind.alone or dist.get_rank() == 0:
        try:
            peer = kind(setting)
            with _threads(kind.threads):
                numbers = _numbers(peer)
        except Unavailable as reason:
            failure = str(reason)
        except Exception as error:
            if kind.required:
                raise
            failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            if reference is not None:
                difference = numbers.difference(reference)
                if not difference <= TOLERANCE[setting.dtype]:
                    failure = f"computes something else: {numbers}, one process {reference}"
    told: list[tuple[str, float]] = [("", 0.0)] * dist.get_world_size()
    dist.all_gather_object(told, (failure, difference))
    failures = [failure for failure, _ in told if failure]
    return peer, failures[0] if failures else "", max(difference for _, difference in told)


def _numbers(peer: Peer) -> Numbers:
    losses, norm = [], 0.0
    for number in range(CHECKED_STEPS):
        losses.append(peer.whole_loss(peer.step()))
        if number == 0:
            norm = peer.gradient_norm()
    return Numbers(tuple(losses), norm)


def _rounds(peers: dict[str, Peer | None], repeats: int) -> dict[str, list[float]]:
    """Seconds of each step of each peer, of the slowest rank; None is a peer that other ranks run."""
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    gc.collect()
    gc.disable()  # a collection walks over the objects of all peers, in whoever's step it falls
    for _ in range(repeats):
        for name, peer in peers.items():
            dist.barrier()
            own = 0.0
            if peer is not None:
                with _threads(peer.threads):
                    start = time.perf_counter()
                    peer.step().item()
                    own = time.perf_counter() - start
            slowest = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            seconds[name].append(slowest.item())
        gc.collect()
    gc.enable()
    return seconds


def _usage(peer: Peer | None, alone: bool) -> tuple[Usage, ...]:
    """One step's usage on each rank that takes part; of several steps the fastest."""
    own: Usage | None = None
    if peer is not None:
        held = peer.tensors_held()
        with _threads(peer.threads):
            profiled = []
            for _ in range(PROFILED_STEPS):
                peer.release_gradients()
                profiled.append(measure_usage(peer.step, held))
        peer.release_gradients()
        own = min(profiled, key=lambda usage: sum(usage.seconds.values()))
    usages: list[Usage | None] = [None] * dist.get_world_size()
    dist.all_gather_object(usages, own)
    return tuple(usage for usage in usages if usage is not None)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(1)
