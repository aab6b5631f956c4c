"""A module under a layout gives the numbers that it gives on one device, or the test fails and says where."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_tp.errors import ParallelConfigError
from lightning_tp.layout import ParallelLayout
from lightning_tp.plan.agree import PlanSource
from lightning_tp.plan.find import SearchOptions, Unsplittable
from lightning_tp.plan.vocabulary import VocabularyParallel
from lightning_tp.testing.comparison import Comparison, compare
from lightning_tp.testing.plain_module import Loss, OptimizerFactory, PlainModule, default_loss, default_optimizer
from lightning_tp.testing.rank_pool import RankError, RankPool
from lightning_tp.testing.training_record import TestPrecision, TrainingRecord, data_parallel_part, train

TOLERANCE = {"64-true": 1e-10, "32-true": 1e-5}
"""Largest relative difference, by precision."""


def assert_same_as_one_device(
    module_factory: Callable[[], nn.Module],
    batch_factory: Callable[[], Any],
    layout: int | tuple[int, int] | ParallelLayout = 2,
    *,
    steps: int = 3,
    optimizer: OptimizerFactory | None = None,
    loss: Loss | None = None,
    precision: TestPrecision = "64-true",
    tolerance: float | None = None,
    plan: PlanSource = "auto",
    unsplittable: Unsplittable = "replicate",
    vocabulary_parallel: VocabularyParallel = "auto",
    pool: RankPool | None = None,
    timeout: float = 300.0,
) -> Comparison:
    """Train a module on one device and under ``layout``, and compare all numbers.

    Both runs go through the Trainer, from the same weights, on the same batch in every step. Every dropout is off in
    both (:class:`lightning_tp.dropout.DropoutOff`), because its masks differ between layouts by design; masks that the
    module draws with code of its own (``torch.rand``) are not, and differ. Every rank is compared with one device: the
    losses, the gradient norms, every gradient of every step (and which parameters have one), and every parameter after
    the last step.

    A difference is relative to the largest absolute value of its tensor, or to 1e-4 of the largest value of all
    gradients (parameters) if that is more; losses and norms are relative to the largest of all steps. Elements whose
    gradient is below 100 machine epsilons of the step's largest gradient in every run are zero but for rounding (a
    key's bias under softmax): such gradients count as equal, and where it is so in every step, the parameter's elements
    are not compared, and are listed in ``Comparison.zero_gradients``.

    Args:
        module_factory: Makes the module: a LightningModule, or any module. A function that can be imported (or a
            ``functools.partial`` of one), since every rank calls it. Called after the seed is set; it must give the
            same weights whenever it is called with the same seed.
        batch_factory: Makes a batch for all data-parallel ranks, which is split along dim 0: a tensor or a tuple, the
            positional arguments of a plain module, or a mapping, its keyword arguments. Importable, and called after
            the seed is set.
        layout: The tensor-parallel size, or ``(data_parallel_size, tensor_parallel_size)``, or a layout.
        steps: Optimizer steps.
        optimizer: Makes the optimizer of a plain module; by default AdamW with ``lr=1e-3`` and ``eps=1e-4``, which is
            above rounding. A LightningModule has its own.
        loss: ``loss(output, batch)``, the scalar that a plain module is trained on; by default ``output.loss`` or
            ``output["loss"]`` if there is one, else a fixed random mean over all tensors of the output, whose dim 0
            must be the batch. With several data-parallel ranks it must be a mean over samples. A LightningModule has
            its own.
        precision: "64-true" shows differences of the split; "32-true" is for code that has no float64.
        tolerance: Largest relative difference; by default 1e-10 for "64-true" and 1e-5 for "32-true". Code that rounds
            to float32 inside cannot be compared closer than about 1e-6.
        plan: As the strategy's.
        unsplittable: As the strategy's.
        vocabulary_parallel: As the strategy's.
        pool: Ranks to run on, as many as the layout has; by default they are started and ended here.
        timeout: Seconds for the run on ranks.

    Raises:
        AssertionError: The numbers differ; the message names the worst of each kind.
        RankError: A rank failed; the message holds its traceback.
        ParallelConfigError: An argument is not legal, or a factory cannot be sent to the ranks.
    """
    comparison = compare_with_one_device(
        module_factory,
        batch_factory,
        layout,
        steps=steps,
        optimizer=optimizer,
        loss=loss,
        precision=precision,
        plan=plan,
        unsplittable=unsplittable,
        vocabulary_parallel=vocabulary_parallel,
        pool=pool,
        timeout=timeout,
    )
    limit = TOLERANCE[precision] if tolerance is None else tolerance
    beyond = [str(difference) for difference in comparison.differences if not difference.size <= limit]
    if beyond:
        raise AssertionError(
            f"The layout gives other numbers than one device, beyond {limit:g}:\n  " + "\n  ".join(beyond)
        )
    return comparison


def compare_with_one_device(
    module_factory: Callable[[], nn.Module],
    batch_factory: Callable[[], Any],
    layout: int | tuple[int, int] | ParallelLayout = 2,
    *,
    steps: int = 3,
    optimizer: OptimizerFactory | None = None,
    loss: Loss | None = None,
    precision: TestPrecision = "64-true",
    plan: PlanSource = "auto",
    unsplittable: Unsplittable = "replicate",
    vocabulary_parallel: VocabularyParallel = "auto",
    pool: RankPool | None = None,
    timeout: float = 300.0,
) -> Comparison:
    """As :func:`assert_same_as_one_device`, without a judgement of the differences."""
    sizes = _layout(layout)
    if pool is not None and pool.world_size != sizes.world_size:
        raise ParallelConfigError(f"The layout has {sizes.world_size} ranks, the pool has {pool.world_size}.")
    if precision not in TOLERANCE:
        raise ParallelConfigError(f"precision must be one of {', '.join(TOLERANCE)}, not {precision!r}.")
    if steps < 1:
        raise ParallelConfigError(f"steps must be at least 1, not {steps}.")
    run = _Run(
        module_factory,
        batch_factory,
        steps,
        optimizer,
        loss,
        precision,
        SearchOptions(unsplittable, vocabulary_parallel),
    )
    try:
        pickle.dumps((run, plan))
    except Exception as error:
        raise ParallelConfigError(
            f"The factories must be functions that the ranks can import (no lambdas, no closures): {error}"
        ) from error
    with nullcontext(pool) if pool else closing(RankPool(sizes.world_size, collective_timeout=timeout)) as ranks:
        try:
            ranks.run(_received, run, timeout=timeout)
        except RankError as error:
            raise ParallelConfigError(
                "The ranks cannot import the factories. Define them in a module or test file, not in an interactive "
                f"session.\n{error}"
            ) from error
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with isolate_rng():
                data_parallel_part(run.batch(), 0, sizes.data_parallel_size)  # before work starts
                single = run(1, 1, "auto")
        finally:
            torch.set_num_threads(threads)
        records = ranks.run(run, sizes.tensor_parallel_size, sizes.data_parallel_size, plan, timeout=timeout)
    return compare(single, records)


def _received(run: _Run) -> None:
    """What a rank runs to show that it can import the factories."""


@dataclass(frozen=True)
class _Run:
    """One training run; it is sent to the ranks."""

    module_factory: Callable[[], nn.Module]
    batch_factory: Callable[[], Any]
    steps: int
    optimizer: OptimizerFactory | None
    loss: Loss | None
    precision: TestPrecision
    options: SearchOptions

    def batch(self) -> Any:
        """The batch, the same on every rank."""
        pl.seed_everything(0, verbose=False)
        return self.batch_factory()

    def __call__(self, tensor_parallel_size: int, data_parallel_size: int, plan: PlanSource) -> TrainingRecord:
        prefix = ""

        def build() -> pl.LightningModule:
            nonlocal prefix
            module = self.module_factory()
            if not isinstance(module, pl.LightningModule):
                prefix = PlainModule.prefix
                return PlainModule(module, self.optimizer or default_optimizer, self.loss or default_loss)
            if self.optimizer or self.loss:
                raise ParallelConfigError(
                    f"{type(module).__name__} is a LightningModule, which is trained with its own loss and optimizer. "
                    "Leave `loss` and `optimizer` out."
                )
            return module

        record = train(
            build,
            [self.batch()] * self.steps,
            self.precision,
            tensor_parallel_size,
            data_parallel_size,
            plan=plan,
            unsplittable=self.options.unsplittable,
            vocabulary_parallel=self.options.vocabulary_parallel,
            dropout=False,
        )
        record.grads = [{name.removeprefix(prefix): g for name, g in grads.items()} for grads in record.grads]
        record.parameters = {name.removeprefix(prefix): p for name, p in record.parameters.items()}
        return record


def _layout(layout: int | tuple[int, int] | ParallelLayout) -> ParallelLayout:
    if not isinstance(layout, ParallelLayout):
        layout = ParallelLayout(1, layout) if isinstance(layout, int) else ParallelLayout(*layout)
    sizes = (layout.data_parallel_size, layout.tensor_parallel_size)
    if min(sizes) < 1 or layout.world_size < 2:
        raise ParallelConfigError(
            f"The layout data_parallel_size x tensor_parallel_size = {sizes[0]} x {sizes[1]} is no parallel one. Give "
            "positive sizes for at least two ranks."
        )
    return layout
