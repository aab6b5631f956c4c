"""Probe: which linears form column/row pairs, read off the computation.

The model runs once with every linear's output cut (:mod:`lightning_tp.plan.trace`). A linear's output is then a
producer and a linear's input a consumer, and the graph says which producers each consumer was computed from. The
connected components of this bipartite graph that do not contain the model's own output are the candidates: all their
producers become columns, all their consumers rows. One backward pass for each rank's chunk of a row's input features
then shows exactly which output rows of each column that rank needs, in whatever order they lie (fused weights
included), and which part of every other parameter on the way (a bias for each head).

Where a component does not fit, the producers that every rank needs alike are taken as inputs of what remains
(:meth:`Analysis._refined`: the rotary keys of latent attention). What is still left over is probed again with
normalisations taken element by element (q and k norms over all heads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_tp.plan.analysis import Analysis
from lightning_tp.plan.candidate import Probe
from lightning_tp.plan.linears import splittable_linears
from lightning_tp.plan.norms import Norm, recognised_norm
from lightning_tp.plan.state import random_state_kept
from lightning_tp.plan.trace import LinearTrace, Run, module_calls


def probe(model: nn.Module, run: Callable[[], Any], tensor_parallel_size: int, first: Run) -> Probe:
    """Run ``model`` through ``run`` and find the candidates for ``tensor_parallel_size`` ranks.

    ``first`` is a run that was traced already. The caller keeps random state and module state
    (:mod:`lightning_tp.plan.state`) and has made all parameters require gradients.
    """
    linears = splittable_linears(model)

    def traced(seed: int, norms: Mapping[str, Norm]) -> Run:
        if seed == 0 and not norms:
            return first
        trace = LinearTrace(linears, seed)
        with random_state_kept(), module_calls(model, trace), norms_by_element(model, norms, trace.run), trace:
            trace.run.outputs = run()
        return trace.run

    analysis = Analysis(model, linears, traced, tensor_parallel_size, {})
    analysis.find_candidates(settled=[])
    result = analysis.result()
    settled = [candidate for candidate in result.candidates if candidate.is_complete]
    norms = _norms(model) if analysis.has_free_columns() or len(settled) < len(result.candidates) else {}
    if not norms:
        return result
    again = Analysis(model, linears, traced, tensor_parallel_size, norms)
    again.find_candidates(settled)
    better = [
        new
        for new in again.candidates
        if new not in settled and new.saved > sum(old.saved for old in result.candidates if old.members & new.members)
    ]
    members = {name for new in better for name in new.members}
    kept = [old for old in result.candidates if not old.members & members]
    misfits = [misfit for misfit in analysis.misfits if not members & misfit.members]
    reasons = {name: reason for name, reason in analysis.reasons.items() if name not in members}
    return replace(result, candidates=[*kept, *better], misfits=misfits, reasons=reasons)


def _norms(model: nn.Module) -> dict[str, Norm]:
    recognised = ((name, recognised_norm(module)) for name, module in model.named_modules())
    return {name: norm for name, norm in recognised if norm is not None}


@contextmanager
def norms_by_element(model: nn.Module, norms: Mapping[str, Norm], run: Run) -> Iterator[None]:
    """Let ``norms`` pass their input on element by element, so that their statistics hide nothing."""
    handles = []
    for name, norm in norms.items():

        def passed(module: nn.Module, args: Any, output: Any, name: str = name, norm: Norm = norm) -> Tensor:
            x: Tensor = args[0]
            run.norm_inputs.append((name, x))
            weight: Any = module.weight
            y = x * (weight + norm.offset)
            bias: Any = module._parameters.get("bias")
            return (y if bias is None else y + bias).to(output.dtype)

        handles.append(model.get_submodule(name).register_forward_hook(passed))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
