"""Plan one architecture, and train it on ranks and on one device."""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from benchmarks.zoo.architecture import Architecture
from benchmarks.zoo.float64 import Float64Module
from benchmarks.zoo.shares import block_share, block_weights, split_weights
from lightning_tp import ShardingPlan, find_plan
from lightning_tp.testing import Comparison, RankPool, assert_same_as_one_device
from lightning_tp.testing.plain_module import PlainModule, default_loss, default_optimizer

TOLERANCE = {"64-true": 1e-9, "32-true": 1e-4}
"""Largest relative difference, by precision."""


@dataclass(frozen=True)
class Whole:
    """A weight of a repeated block that every rank holds and uses whole.

    Attributes:
        name: The linear or the parameter.
        elements: Number of elements of its weight.
        reason: Why, in the plan's words.
    """

    name: str
    elements: int
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What one architecture has given at one tensor-parallel size.

    Attributes:
        plan: The plan for the model in float32, as it is.
        block_share: Share of the weights in repeated blocks that is split, 0 to 1.
        whole: The weights in repeated blocks that are not split.
        comparison: Ranks against one device; None if a number was wrong or a rank failed.
        failure: What was wrong, in one line; empty if nothing was.
    """

    plan: ShardingPlan | None = None
    block_share: float | None = None
    whole: tuple[Whole, ...] = ()
    comparison: Comparison | None = None
    failure: str = ""


@dataclass
class Row:
    """One architecture, and what it has given by tensor-parallel size."""

    architecture: Architecture
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(outcome.failure for outcome in self.outcomes.values())


def run(architecture: Architecture, size: int, pool: RankPool) -> Outcome:
    """Plan and compare. An exception ends as a failure in the outcome, so that a table has all its rows.

    Args:
        architecture: The model.
        size: Tensor-parallel size, the number of ranks in ``pool``.
        pool: Where the ranks run.
    """
    plan, share, whole = None, None, ()
    try:
        torch.manual_seed(0)
        model = architecture.build()
        plan = find_plan(model, architecture.batch(), size, unsplittable="replicate", vocabulary_parallel=True)
        share, whole = block_share(model, plan), whole_weights(model, plan)
        comparison = compare(architecture, size, pool)
        check_same_plan(plan, comparison.plan)
    except Exception as error:
        return Outcome(plan, share, whole, failure=first_line(error))
    return Outcome(plan, share, whole, comparison)


def compare(architecture: Architecture, size: int, pool: RankPool) -> Comparison:
    """Three steps of AdamW on one device and on ``size`` ranks, in float64 throughout if the architecture has it.

    Raises:
        AssertionError: A number differs by more than :data:`TOLERANCE`.
        RankError: A rank failed.
    """
    limit = TOLERANCE[architecture.precision]
    comparison = assert_same_as_one_device(
        partial(_trained, architecture),
        architecture.batch,
        size,
        precision=architecture.precision,
        tolerance=limit,
        vocabulary_parallel=True,
        pool=pool,
    )
    difference = loss_difference(comparison)
    if not difference <= limit:
        raise AssertionError(f"The losses differ by {difference:.2e}, beyond {limit:g}.")
    return comparison


def loss_difference(comparison: Comparison) -> float:
    """The largest difference of the losses, relative to the largest, in the precision in which they were recorded."""
    expected, found = comparison.one_device.losses, comparison.layout.losses
    return max(abs(a - b) for a, b in zip(expected, found, strict=True)) / max(map(abs, expected))


def _trained(architecture: Architecture) -> PlainModule:
    kind = Float64Module if architecture.precision == "64-true" else PlainModule
    return kind(architecture.build(), default_optimizer, default_loss)


def whole_weights(model: nn.Module, plan: ShardingPlan) -> tuple[Whole, ...]:
    reasons = {entry.module: entry.reason for entry in plan.replicated}
    split = split_weights(plan)
    whole = []
    for name, elements in block_weights(model).items():
        if name not in split:
            linear = name.removesuffix(".weight")
            known = linear if linear in reasons else name
            whole.append(Whole(known, elements, reasons.get(known, "it is no factor of a matrix product")))
    return tuple(whole)


def check_same_plan(plan: ShardingPlan, trained: ShardingPlan) -> None:
    """Raise AssertionError where the plan that was compared splits something else than the plan that is reported."""
    found = {name.removeprefix(PlainModule.prefix) for name in split_weights(trained)}
    if different := sorted(split_weights(plan) ^ found):
        raise AssertionError(f"In training another plan was found than before it: only one splits {different[0]}.")


def first_line(error: Exception) -> str:
    """What went wrong, in one line: of a rank's traceback its last, of wrong numbers the first that was wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    if raised:
        return raised[0]
    if isinstance(error, AssertionError) and len(lines) > 1:
        return f"{lines[0]} {lines[1]}"
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def quiet() -> None:
    """Leave the screen to the table; also run on every rank."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
