"""Where the records of two runs differ most, and what counts as zero but for rounding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_tp.plan.sharding_plan import ShardingPlan
from lightning_tp.testing.training_record import TrainingRecord, as_double, relative

_ROUNDINGS = 100.0
"""A gradient that never exceeds this many machine epsilons of the step's largest gradient is zero but for rounding: a
sum whose terms cancel leaves some epsilons of its largest term."""
_SMALL = 1e-4
"""A tensor whose values are below this part of the largest of its kind is compared on that scale: terms that cancel in
part leave rounding that is large for what remains of them."""


@dataclass(frozen=True)
class Difference:
    """Where a run under a layout differs most from one device, relative to the largest value of the tensor.

    Attributes:
        kind: "loss", "gradient norm", "gradient" or "parameter".
        name: Which one, and of which step; empty if nothing differs.
        size: The relative difference; infinite if a value is not a number.
        expected: The value on one device, where the tensors differ most.
        found: The value under the layout.
        rank: The rank that has found it.
    """

    kind: str
    name: str = ""
    size: float = 0.0
    expected: float = 0.0
    found: float = 0.0
    rank: int = 0

    def __str__(self) -> str:
        values = f"one device {self.expected:.10g}, rank {self.rank} {self.found:.10g}"
        return f"{self.kind} {self.name}: {self.size:.2e} ({values})"


@dataclass(frozen=True)
class Comparison:
    """Two runs of one module. Every rank is compared; a difference is that of the rank that is farthest off.

    Attributes:
        loss: The largest difference of the losses of all steps, relative to the largest loss.
        grad_norm: That of the gradient norms, relative to the largest norm.
        gradients: That of all gradients of all steps.
        parameters: That of the parameters after the last step.
        zero_gradients: Parameters of which some elements have gradients that are zero but for rounding in every step,
            and how many elements. Their gradients count as equal, and their values after the last step are not
            compared: AdamW turns rounding into steps.
        parameters_per_rank: Number of parameter elements that each rank holds.
        one_device: What one device has given.
        layout: What the layout has given, on its first rank.
    """

    loss: Difference
    grad_norm: Difference
    gradients: Difference
    parameters: Difference
    zero_gradients: Mapping[str, int]
    parameters_per_rank: tuple[int, ...]
    one_device: TrainingRecord
    layout: TrainingRecord

    @property
    def plan(self) -> ShardingPlan:
        """The plan by which the module was split. It calls a plain module ``module``."""
        assert self.layout.plan is not None
        return self.layout.plan

    @property
    def planning_seconds(self) -> float:
        """Seconds to find and prove the plan."""
        return self.plan.found_in_seconds

    @property
    def total_parameters(self) -> int:
        """Number of parameter elements of the whole module."""
        return sum(parameter.numel() for parameter in self.one_device.parameters.values())

    @property
    def differences(self) -> tuple[Difference, ...]:
        return (self.loss, self.grad_norm, self.gradients, self.parameters)

    @property
    def largest(self) -> float:
        return max(difference.size for difference in self.differences)


def compare(single: TrainingRecord, ranks: Sequence[TrainingRecord]) -> Comparison:
    """Compare the record of every rank with that of one device.

    Raises:
        AssertionError: The runs do not have the same gradients or parameters, by name or shape.
    """
    for rank, record in enumerate(ranks):
        _check_names(single, record, rank)
    limits = [_rounding(gradients) for gradients in single.grads]
    noise = _noise(single, ranks, limits)
    return Comparison(
        loss=_worst(_numbers("loss", single.losses, r.losses, rank) for rank, r in enumerate(ranks)),
        grad_norm=_worst(
            _numbers("gradient norm", single.grad_norms, r.grad_norms, rank) for rank, r in enumerate(ranks)
        ),
        gradients=_worst(_gradients(single, r, limits, rank) for rank, r in enumerate(ranks)),
        parameters=_worst(
            _tensors("parameter", single.parameters, r.parameters, noise, "", rank) for rank, r in enumerate(ranks)
        ),
        zero_gradients={name: int(mask.sum()) for name, mask in noise.items() if mask.any()},
        parameters_per_rank=tuple(r.parameters_on_rank for r in ranks),
        one_device=single,
        layout=ranks[0],
    )


def _check_names(single: TrainingRecord, parallel: TrainingRecord, rank: int) -> None:
    for step, (expected, found) in enumerate(zip(single.grads, parallel.grads, strict=True), start=1):
        if expected.keys() != found.keys():
            only = sorted(expected.keys() ^ found.keys())
            raise AssertionError(
                f"In step {step} only one of the runs has gradients of {', '.join(only[:5])} "
                f"({'one device' if only[0] in expected else f'rank {rank}'} has that of {only[0]})."
            )
    if single.parameters.keys() != parallel.parameters.keys():
        only = sorted(single.parameters.keys() ^ parallel.parameters.keys())
        raise AssertionError(f"Only one of the runs has the parameters {', '.join(only[:5])}.")
    for name, parameter in single.parameters.items():
        shape = parallel.parameters[name].shape
        if shape != parameter.shape:
            raise AssertionError(f"parameter {name} has the shape {tuple(shape)}, not {tuple(parameter.shape)}.")


def _largest(tensors: Mapping[str, Tensor]) -> float:
    return max((float(tensor.abs().max()) for tensor in tensors.values() if tensor.numel()), default=0.0)


def _rounding(gradients: Mapping[str, Tensor]) -> float:
    """The value up to which a gradient of this step is zero but for rounding."""
    epsilon = max((torch.finfo(gradient.dtype).eps for gradient in gradients.values()), default=0.0)
    return _ROUNDINGS * epsilon * _largest(gradients)


def _noise(single: TrainingRecord, ranks: Sequence[TrainingRecord], limits: list[float]) -> dict[str, Tensor]:
    """By parameter, which elements have gradients that are zero but for rounding in every step and run.

    Elements whose gradient is exactly zero in all of them (rows of an embedding that the batch does not use) are no
    noise: no optimizer makes them differ.
    """
    noise = {}
    for name in single.parameters:
        small: Tensor | None = None
        exact: Tensor | None = None
        for record in (single, *ranks):
            for gradients, limit in zip(record.grads, limits, strict=True):
                if name in gradients:
                    value = gradients[name].abs()
                    small = value <= limit if small is None else small & (value <= limit)
                    exact = value == 0 if exact is None else exact & (value == 0)
        if small is not None and exact is not None:
            noise[name] = small & ~exact
    return noise


def _gradients(single: TrainingRecord, parallel: TrainingRecord, limits: list[float], rank: int) -> Difference:
    steps = zip(single.grads, parallel.grads, limits, strict=True)
    return _worst(
        _tensors("gradient", expected, found, _both_zero(expected, found, limit), f" (step {step})", rank)
        for step, (expected, found, limit) in enumerate(steps, start=1)
    )


def _both_zero(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], limit: float) -> dict[str, Tensor]:
    return {name: (tensor.abs() <= limit) & (found[name].abs() <= limit) for name, tensor in expected.items()}


def _worst(differences: Iterable[Difference]) -> Difference:
    return max(differences, key=lambda difference: difference.size)


def _numbers(kind: str, expected: list[float], found: list[float], rank: int) -> Difference:
    # A loss may pass near zero: the numbers of all steps are compared on one scale.
    floor = max(abs(number) for number in expected)
    pairs = enumerate(zip(expected, found, strict=True), start=1)
    return _worst(
        Difference(kind, f"of step {step}", relative(as_double(b), as_double(a), floor), a, b, rank)
        for step, (a, b) in pairs
    )


def _tensors(
    kind: str,
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    equal: Mapping[str, Tensor],
    where: str,
    rank: int,
) -> Difference:
    """The worst tensor; elements that ``equal`` marks count as equal."""
    floor = _largest(expected) * _SMALL
    worst = Difference(kind, rank=rank)
    for name, tensor in expected.items():
        if not tensor.numel():
            continue
        other = torch.where(equal[name], tensor, found[name]) if name in equal else found[name]
        size = relative(other, tensor, floor or 1e-30)
        if size > worst.size:
            place = int((other - tensor).abs().flatten().argmax())
            values = float(tensor.flatten()[place]), float(other.flatten()[place])
            worst = Difference(kind, f"{name}{where}", size, *values, rank)
    return worst
