"""One plan for all ranks: rank zero loads or finds it, the others receive it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import lightning.pytorch as pl

from lightning_tp.errors import ParallelConfigError, raise_on_rank_zero, run_on_rank_zero
from lightning_tp.layout import ParallelLayout
from lightning_tp.parallel.apply import check_plan, refuse_hidden_references
from lightning_tp.parallel.local_parameters import parallel_state
from lightning_tp.plan.example import example_run
from lightning_tp.plan.find import SearchOptions, search_plan
from lightning_tp.plan.sharding_plan import ShardingPlan

PlanSource = Literal["auto"] | str | os.PathLike[str] | Mapping[str, str] | ShardingPlan


def agreed_plan(
    trainer: pl.Trainer, layout: ParallelLayout, source: PlanSource, options: SearchOptions
) -> ShardingPlan:
    """The plan for the trainer's LightningModule, the same on every rank. Collective.

    A model that was split before keeps its plan. A saved plan is checked and used as it is; "auto" and a mapping of
    name patterns run the model on rank zero.

    Raises:
        ParallelConfigError: on rank zero; the other ranks exit with status 1.
    """
    state = parallel_state(trainer.lightning_module)
    if state is None:
        return run_on_rank_zero(lambda: _plan(trainer, layout.tensor_parallel_size, source, options))
    sizes = (layout.data_parallel_size, layout.tensor_parallel_size)
    if state.plan is None or state.mesh_sizes != sizes:
        raise_on_rank_zero(
            ParallelConfigError(
                "This model was split before for data_parallel_size x tensor_parallel_size = "
                f"{state.mesh_sizes[0]} x {state.mesh_sizes[1]} and cannot be split again for {sizes[0]} x {sizes[1]}. "
                "Build a new one and load a checkpoint into it."
            ),
            trainer.global_rank,
        )
    assert state.plan is not None
    return state.plan


def _plan(trainer: pl.Trainer, size: int, source: PlanSource, options: SearchOptions) -> ShardingPlan:
    module = trainer.lightning_module
    refuse_hidden_references(module)
    if isinstance(source, (ShardingPlan, os.PathLike)) or (isinstance(source, str) and source != "auto"):
        plan = source if isinstance(source, ShardingPlan) else ShardingPlan.load(source)
        check_plan(module, plan, size)
        return plan
    if size == 1:
        return ShardingPlan(tensor_parallel_size=1)
    styles = None if isinstance(source, str) else source
    return search_plan(module, example_run(trainer), size, styles, options)[0]
