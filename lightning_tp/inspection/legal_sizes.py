"""The tensor-parallel sizes that fit a planned model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tp.parallel.torch_modules import local_forward
from lightning_tp.plan.boundary import BoundarySplit
from lightning_tp.plan.find import randomised_parameters
from lightning_tp.plan.linears import splittable_linears
from lightning_tp.plan.needs import is_clean
from lightning_tp.plan.norms import recognised_norm
from lightning_tp.plan.probe import norms_by_element
from lightning_tp.plan.sharding_plan import Region, ShardingPlan
from lightning_tp.plan.state import module_state_kept, random_state_kept
from lightning_tp.plan.trace import LinearCall, LinearTrace, Run, module_calls

LARGEST_SIZE = 64
"""Larger sizes are not looked at: tensor parallelism stays within one fast interconnect."""
_MOST_RUNS = 8
"""Runs with other stand-ins, where an activation (a ReLU below zero) hides what a share is computed from."""


def legal_sizes(model: nn.Module, run: Callable[[], Any], plan: ShardingPlan) -> list[int]:
    """The sizes up to 64 by which every region of ``plan`` can be cut without cutting a head, ascending.

    They are read off the computation; only a plan for a size proves it. The plan's own size is among them, and 1
    always. A model of which nothing is split has these two alone.
    """
    with random_state_kept(), module_state_kept(model), torch.enable_grad():
        was_training = {module: module.training for module in model.modules()}
        model.train()
        try:
            with randomised_parameters(model):
                sizes = _fitting_all(model, run, plan) if plan.regions else {1}
        finally:
            for module, training in was_training.items():
                module.training = training
    return sorted({*sizes, plan.tensor_parallel_size})


def _fitting_all(model: nn.Module, run: Callable[[], Any], plan: ShardingPlan) -> set[int]:
    runs: dict[tuple[int, tuple[str, ...]], Run] = {}

    def traced(seed: int, norms: tuple[str, ...]) -> Run:
        if (seed, norms) not in runs:
            runs[seed, norms] = _traced(model, run, seed, norms)
        return runs[seed, norms]

    legal = set(range(1, LARGEST_SIZE + 1))
    kinds: set[Any] = set()
    # Linears first: their sizes are read off one run, while those of other modules take a search for each size.
    for region in sorted(plan.regions, key=lambda region: region.boundary is not None):
        if region.boundary is None:
            legal = _fitting(model, region, legal, lambda seed, norms=region.norms: traced(seed, norms))  # type: ignore[misc]
        elif (kind := _kind(model, region)) not in kinds:
            kinds.add(kind)
            module = model.get_submodule(region.module)
            call = traced(0, ()).module_calls[region.module][0]
            split = BoundarySplit(model, region.module, call, plan.tensor_parallel_size, local_forward(module))
            legal = _fitting_boundary(split, plan.tensor_parallel_size, legal)
    return legal


def _fitting_boundary(split: BoundarySplit, planned: int, sizes: set[int]) -> set[int]:
    """Those of ``sizes`` by which as much of a module can be cut as by the planned one."""
    most = max((cut.elements for cut in split.cuts(planned)), default=0)
    lengths = {length for parameter in split.parameters.values() for length in parameter.shape}
    fitting = {1, planned}
    for size in sorted(sizes - fitting):
        divisors = {divisor for divisor in sizes if divisor < size and size % divisor == 0}
        if divisors <= fitting and any(length % size == 0 for length in lengths):
            cuts = split.cuts(size)
            if cuts and cuts[0].elements >= most:
                fitting.add(size)
    return fitting


def _kind(model: nn.Module, region: Region) -> tuple[Any, ...]:
    """What a module has in common with those that can be cut like it: class, shapes and numbers (of heads)."""
    module = model.get_submodule(region.module)
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    numbers = [(key, value) for key, value in vars(module).items() if type(value) is int]
    return (type(module), *shapes, *numbers)


def _traced(model: nn.Module, run: Callable[[], Any], seed: int, norms: tuple[str, ...]) -> Run:
    recognised = {name: recognised_norm(model.get_submodule(name)) for name in norms}
    known = {name: norm for name, norm in recognised.items() if norm is not None}
    trace = LinearTrace(splittable_linears(model), seed)
    with module_calls(model, trace), norms_by_element(model, known, trace.run), trace:
        trace.run.outputs = run()
    return trace.run


def _fitting(model: nn.Module, region: Region, legal: set[int], traced: Callable[[int], Run]) -> set[int]:
    """Those of ``legal`` at which the ranks need equal shares of the region's columns, disjoint or the same."""
    features = [call.x.shape[-1] for call in _first_calls(traced(0), region.rows)]
    sizes = [size for size in sorted(legal - {1}) if all(count % size == 0 for count in features)]
    names = [column.module for column in region.columns]
    weights = {name: model.get_submodule(name).weight.numel() for name in names}  # type: ignore[operator]
    fitting = {1}
    finest: dict[int, Mapping[str, Tensor]] = {}
    for size in reversed(sizes):
        multiple = next((known for known in finest if known % size == 0), None)
        if multiple is None:
            finest[size] = needs = _needs(region, names, size, traced)
        else:
            # Neighbouring chunks make up the chunks of a smaller size.
            needs = {name: rows.unflatten(0, (size, -1)).any(1) for name, rows in finest[multiple].items()}
        # Keys and values may be shared by ranks. Where most of the outputs are, the size cuts heads in parts.
        shared = sum(weights[name] for name, rows in needs.items() if int(rows.sum()) > rows.shape[1])
        if all(map(is_clean, needs.values())) and 2 * shared <= sum(weights.values()):
            fitting.add(size)
    return fitting


def _needs(region: Region, names: list[str], size: int, traced: Callable[[int], Run]) -> Mapping[str, Tensor]:
    """For each column ``[size, out]``: the output rows from which each of ``size`` chunks of the rows is computed."""
    needs: dict[str, Tensor] = {}
    for seed in range(_MOST_RUNS):
        columns = _first_calls(traced(seed), names)
        for row in _first_calls(traced(seed), region.rows):
            for rank, chunk in enumerate(row.x.chunk(size, -1)):
                weights = torch.randn(chunk.shape, dtype=chunk.dtype, device=chunk.device)
                targets = [call.y for call in columns]
                grads = torch.autograd.grad((chunk * weights).sum(), targets, retain_graph=True, allow_unused=True)
                for name, call, grad in zip(names, columns, grads, strict=True):
                    rows = needs.setdefault(name, torch.zeros(size, call.y.shape[-1], dtype=torch.bool))
                    if grad is not None:
                        rows[rank] |= (grad.reshape(-1, grad.shape[-1]) != 0).any(0).cpu()
        if all(rows.any(0).all() for rows in needs.values()):
            break
    return needs


def _first_calls(run: Run, names: list[str] | tuple[str, ...]) -> list[LinearCall]:
    first: dict[str | None, LinearCall] = {}
    for call in run.calls:
        first.setdefault(call.owner, call)
    return [first[name] for name in names]
