"""A module under a layout gives the numbers that it gives on one device, or the test fails and says where."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_tp.errors import ParallelConfigError
from lightning_tp.layout import ParallelLayout
from lightning_tp.plan.agree import PlanSource
from lightning_tp.plan.find import Unsplittable
from lightning_tp.plan.graph import tensors_in
from lightning_tp.plan.sharding_plan import ShardingPlan
from lightning_tp.testing.rank_pool import RankPool
from lightning_tp.testing.training_record import TestPrecision, TrainingRecord, relative, train

TOLERANCE = {"64-true": 1e-10, "32-true": 1e-5}
"""Largest relative difference, by precision."""
_ROUNDING = 1e-4
"""A tensor whose values are below this part of the largest of its kind is compared on that scale: a gradient that is
zero but for rounding (a key's bias under softmax) has no relative precision."""


@dataclass(frozen=True)
class Difference:
    """Where two runs differ most, relative to the largest value of the tensor."""

    kind: str
    name: str
    size: float
    expected: float
    found: float

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.size:.2e} (one device {self.expected:.10g}, layout {self.found:.10g})"


@dataclass(frozen=True)
class Comparison:
    """Two runs of one module.

    Attributes:
        loss: The largest difference of the losses.
        grad_norm: That of the gradient norms.
        gradients: That of all gradients of all steps.
        parameters: That of the parameters after the last step.
        one_device: What one device has given.
        layout: What the layout has given, on its first rank.
    """

    loss: Difference
    grad_norm: Difference
    gradients: Difference
    parameters: Difference
    one_device: TrainingRecord
    layout: TrainingRecord

    @property
    def plan(self) -> ShardingPlan:
        """The plan by which the module was split."""
        assert self.layout.plan is not None
        return self.layout.plan

    @property
    def differences(self) -> tuple[Difference, ...]:
        return (self.loss, self.grad_norm, self.gradients, self.parameters)

    @property
    def largest(self) -> float:
        return max(difference.size for difference in self.differences)


def assert_same_as_one_device(
    module_factory: Callable[[], nn.Module],
    batch_factory: Callable[[], Any],
    layout: int | tuple[int, int] | ParallelLayout = 2,
    *,
    steps: int = 3,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    precision: TestPrecision = "64-true",
    tolerance: float | None = None,
    plan: PlanSource = "auto",
    unsplittable: Unsplittable = "replicate",
    pool: RankPool | None = None,
    timeout: float = 300.0,
) -> Comparison:
    """Train a module on one device and under ``layout``, and compare all numbers.

    Both runs go through the Trainer, with every dropout off, from the same weights (the factory is called after the
    seed is set), on the same batch in every step. Compared are the losses, the gradient norms, every gradient of every
    step (and which parameters have one), and every parameter after the last step.

    Args:
        module_factory: Makes the module: a LightningModule, or any module. A function that can be imported (or a
            ``functools.partial`` of one), since every rank calls it.
        batch_factory: Makes a batch for all data-parallel ranks, which is split along dim 0: a tensor or a tuple, the
            positional arguments of a plain module, or a mapping, its keyword arguments. Importable as well.
        layout: The tensor-parallel size, or ``(data_parallel_size, tensor_parallel_size)``, or a layout.
        steps: Optimizer steps.
        optimizer: Makes the optimizer of a plain module; by default AdamW with ``lr=1e-3`` and ``eps=1e-4``, which is
            above rounding, so that gradients that are zero but for rounding do not decide a step.
        loss: ``loss(output, batch)``, the scalar that a plain module is trained on; by default ``output.loss`` or
            ``output["loss"]`` if there is one, else a fixed random sum over all tensors of the output.
        precision: "64-true" shows differences of the split; "32-true" for code that has no float64.
        tolerance: Largest relative difference; by default 1e-10 for "64-true" and 1e-5 for "32-true". Code that rounds
            to float32 inside cannot be compared closer than about 1e-6.
        plan: As the strategy's.
        unsplittable: As the strategy's.
        pool: Ranks to run on, as many as the layout has; by default they are started and ended here.
        timeout: Seconds for the run on ranks.

    Raises:
        AssertionError: The numbers differ; the message names the worst of each kind.
        RankError: A rank failed; the message holds its traceback.
        ParallelConfigError: A factory cannot be sent to the ranks, or the pool has another size.
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
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    precision: TestPrecision = "64-true",
    plan: PlanSource = "auto",
    unsplittable: Unsplittable = "replicate",
    pool: RankPool | None = None,
    timeout: float = 300.0,
) -> Comparison:
    """As :func:`assert_same_as_one_device`, without a judgement of the differences."""
    resolved = _layout(layout)
    run = _Run(module_factory, batch_factory, steps, optimizer, loss, precision)
    try:
        pickle.dumps((run, plan))
    except Exception as error:
        raise ParallelConfigError(
            f"The factories must be functions that the ranks can import (no lambdas, no closures): {error}"
        ) from error
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        single = run(1, 1, "auto", unsplittable)
    finally:
        torch.set_num_threads(threads)
    world = resolved.data_parallel_size * resolved.tensor_parallel_size
    if pool is not None and pool.world_size != world:
        raise ParallelConfigError(f"The layout has {world} ranks, the pool has {pool.world_size}.")
    ranks = pool or RankPool(world)
    try:
        records = ranks.run(
            run, resolved.tensor_parallel_size, resolved.data_parallel_size, plan, unsplittable, timeout=timeout
        )
    finally:
        if pool is None:
            ranks.close()
    return _compared(single, records[0])


@dataclass(frozen=True)
class _Run:
    """One training run; it is sent to the ranks."""

    module_factory: Callable[[], nn.Module]
    batch_factory: Callable[[], Any]
    steps: int
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None
    loss: Callable[[Any, Any], Tensor] | None
    precision: TestPrecision

    def __call__(
        self, tensor_parallel_size: int, data_parallel_size: int, plan: PlanSource, unsplittable: Unsplittable
    ) -> TrainingRecord:
        batch = self.batch_factory()
        record = train(
            self._module,
            [batch] * self.steps,
            self.precision,
            tensor_parallel_size,
            data_parallel_size,
            plan=plan,
            unsplittable=unsplittable,
            dropout=False,
        )
        prefix = f"{_PLAIN}."
        record.grads = [{name.removeprefix(prefix): g for name, g in grads.items()} for grads in record.grads]
        record.parameters = {name.removeprefix(prefix): p for name, p in record.parameters.items()}
        return record

    def _module(self) -> pl.LightningModule:
        module = self.module_factory()
        if isinstance(module, pl.LightningModule):
            return module
        return PlainModule(module, self.optimizer or default_optimizer, self.loss or default_loss)


_PLAIN = "module"


class PlainModule(pl.LightningModule):
    """Any module, as a LightningModule."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        loss: Callable[[Any, Any], Tensor],
    ) -> None:
        super().__init__()
        self.module = module
        self.make_optimizer, self.make_loss = optimizer, loss

    def forward(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self.module(**batch)
        return self.module(*batch) if isinstance(batch, (tuple, list)) else self.module(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.make_loss(self(batch), batch)

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(self.module.parameters())


def default_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1e-3, eps=1e-4)


def default_loss(output: Any, batch: Any) -> Tensor:
    """The model's own loss, or a fixed random mean over all floating tensors of its output."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    total: Any = 0.0
    for tensor in tensors_in(output):
        if tensor.is_floating_point() and tensor.requires_grad:
            # The weights repeat over the batch: the mean over data-parallel parts is that of the whole.
            generator = torch.Generator().manual_seed(0)
            weights = torch.randn(tensor.shape[1:], generator=generator, dtype=torch.float64).to(tensor)
            total = total + (tensor * weights).mean()
    if not isinstance(total, Tensor):
        raise ParallelConfigError("The module returns no tensor to train on. Give `loss`.")
    return total


def _layout(layout: int | tuple[int, int] | ParallelLayout) -> ParallelLayout:
    if isinstance(layout, ParallelLayout):
        return layout
    return ParallelLayout(1, layout) if isinstance(layout, int) else ParallelLayout(*layout)


def _compared(single: TrainingRecord, parallel: TrainingRecord) -> Comparison:
    gradients = Difference("gradient", "", 0.0, 0.0, 0.0)
    for step, (expected, found) in enumerate(zip(single.grads, parallel.grads, strict=True), start=1):
        if expected.keys() != found.keys():
            only = sorted(expected.keys() ^ found.keys())
            raise AssertionError(f"In step {step} only one of the runs has gradients of {', '.join(only[:5])}.")
        gradients = max(gradients, _worst("gradient", expected, found, f" (step {step})"), key=lambda d: d.size)
    return Comparison(
        loss=_worst_number("loss", single.losses, parallel.losses),
        grad_norm=_worst_number("gradient norm", single.grad_norms, parallel.grad_norms),
        gradients=gradients,
        parameters=_worst("parameter", single.parameters, parallel.parameters, ""),
        one_device=single,
        layout=parallel,
    )


def _worst_number(kind: str, expected: list[float], found: list[float]) -> Difference:
    pairs = enumerate(zip(expected, found, strict=True), start=1)
    differences = [
        Difference(kind, f"of step {step}", relative(torch.tensor(b).double(), torch.tensor(a).double()), a, b)
        for step, (a, b) in pairs
    ]
    return max(differences, key=lambda difference: difference.size)


def _worst(kind: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> Difference:
    largest = max(float(tensor.abs().max()) for tensor in expected.values() if tensor.numel())
    worst = Difference(kind, "", 0.0, 0.0, 0.0)
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            raise AssertionError(f"{kind} {name} has the shape {tuple(found[name].shape)}, not {tuple(tensor.shape)}.")
        if tensor.numel():
            size = relative(found[name], tensor, floor=largest * _ROUNDING)
            if size > worst.size:
                place = int((found[name] - tensor).abs().flatten().argmax())
                values = float(tensor.flatten()[place]), float(found[name].flatten()[place])
                worst = Difference(kind, f"{name}{where}", size, *values)
    return worst
