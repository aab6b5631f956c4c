"""Train a language model, built from ``conf/``: ``python recipes/train.py [group=option] [key=value]``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parents[1]
# The configuration names classes as `recipes.…`, from whatever folder this file is started.
sys.path.insert(0, str(ROOT))

import lightning_tp  # noqa: E402, F401  registers the strategy names
from lightning_tp.errors import ParallelConfigError  # noqa: E402
from lightning_tp.hydra_errors import explain_overrides, plain_errors  # noqa: E402
from lightning_tp.launcher import finish_job  # noqa: E402
from recipes.tracking import finish_tracking, loggable_config  # noqa: E402

CONFIG_DIR = ROOT / "conf"


def build_trainer(config: DictConfig) -> Trainer:
    """The Trainer of ``config`` with its strategy, loggers and callbacks."""
    strategy = config.strategy if isinstance(config.strategy, str) else instantiate(config.strategy)
    trainer: Trainer = instantiate(
        config.trainer,
        strategy=strategy,
        logger=[instantiate(node) for node in config.logger.values() if node is not None] or False,
        callbacks=[instantiate(node) for node in config.callbacks.values() if node is not None],
        default_root_dir=config.output_dir,
    )
    if strategy == "auto" and trainer.world_size != 1:
        raise ParallelConfigError(
            f"strategy=single trains on one device, but trainer.devices={config.trainer.devices} and "
            f"trainer.num_nodes={config.trainer.num_nodes} give {trainer.world_size}. "
            "Leave both out, or choose strategy=ddp, strategy=tp or strategy=tp_fsdp."
        )
    if isinstance(strategy, DDPStrategy) and HydraConfig.get().mode == RunMode.MULTIRUN and trainer.world_size > 1:
        raise ParallelConfigError(
            "strategy=ddp cannot run in a sweep: every process that Lightning's launcher starts would repeat the whole "
            "sweep. Start the jobs one by one, or choose strategy=tp with strategy.tensor_parallel_size=1."
        )
    return trainer


def train(config: DictConfig) -> None:
    """Build everything, fit, and evaluate if ``config.test`` says so."""
    seed_everything(config.seed, workers=True)
    data = instantiate(config.data)
    model = instantiate(config.model)
    trainer = build_trainer(config)
    try:
        for logger in trainer.loggers:
            logger.log_hyperparams(loggable_config(config))
        trainer.fit(model, datamodule=data, ckpt_path=config.ckpt_path)
        if config.test:
            trainer.test(model, datamodule=data)
        if trainer.is_global_zero:
            print(f"Everything that this run wrote lies in {config.output_dir}", flush=True)
    finally:
        finish_tracking()
        finish_job(trainer)


@explain_overrides(CONFIG_DIR, "train")
@hydra.main(config_path=str(CONFIG_DIR), config_name="train", version_base="1.3")
def main(config: DictConfig) -> None:
    # The text is in memory: a loader process would only add copies.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Lightning 2.6 calls an older name of torch 2.13.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    with plain_errors():
        train(config)


if __name__ == "__main__":
    main()
