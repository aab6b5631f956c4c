"""Tells the loggers how a run is laid out and what is split."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from lightning_tp.callbacks.run_info import Plan, TensorParallel, count_parameters


class ParallelLogger(pl.Callback):
    """Logs the parallel layout, the parameter counts and the sharding plan when a fit starts.

    Every logger gets the sizes as hyperparameters ``parallel/...``. The plan goes to wandb as config and summary
    text, to the CSV logger's ``hparams.yaml``, and to TensorBoard as text. Under a strategy that is not
    tensor-parallel, only the world size is logged.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        sizes: dict[str, Any] = {"parallel/world_size": trainer.world_size}
        plan: Plan | None = None
        if isinstance(strategy, TensorParallel):
            plan = strategy.plan
            parameters = count_parameters(trainer)
            assert parameters is not None
            sizes |= {
                "parallel/data_parallel_size": strategy.layout.data_parallel_size,
                "parallel/tensor_parallel_size": strategy.layout.tensor_parallel_size,
                "parallel/parameters": parameters.total,
                "parallel/parameters_per_rank": parameters.per_rank,
                "parallel/parameters_split": parameters.split,
                "parallel/split_share": parameters.split_share,
            }
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.log_hyperparams(sizes)
            if plan is not None:
                _log_plan(logger, plan)


def _log_plan(logger: Any, plan: Plan) -> None:
    if isinstance(logger, WandbLogger):
        logger.log_hyperparams({"parallel_plan": plan.to_dict()})
        logger.experiment.summary["parallel/plan"] = plan.describe()
    elif isinstance(logger, CSVLogger):
        logger.log_hyperparams({"parallel_plan": plan.to_dict()})
    elif isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text("parallel/plan", f"```\n{plan.describe()}\n```")
