"""lightning_tp: tensor-parallel training for PyTorch Lightning, by one flag of the Trainer.

Importing the package registers the strategy names "tensor_parallel", "tensor_parallel_fork" and
"tensor_parallel_spawn", so that ``Trainer(strategy="tensor_parallel", devices=2)`` works.
"""

from lightning.pytorch.strategies import StrategyRegistry as _StrategyRegistry

from lightning_tp.errors import ParallelConfigError, PlanError
from lightning_tp.layout import ParallelLayout
from lightning_tp.parallel.apply import parallelize
from lightning_tp.parallel.kept import keep_reduced_outputs
from lightning_tp.plan.find import find_plan
from lightning_tp.plan.meta import parameters_on_meta
from lightning_tp.plan.recheck import prove_plan
from lightning_tp.plan.sharding_plan import ShardingPlan
from lightning_tp.strategy import TensorParallelStrategy

__version__ = "0.1.0"
__all__ = [
    "ParallelConfigError",
    "ParallelLayout",
    "PlanError",
    "ShardingPlan",
    "TensorParallelStrategy",
    "find_plan",
    "keep_reduced_outputs",
    "parallelize",
    "parameters_on_meta",
    "prove_plan",
]

TensorParallelStrategy.register_strategies(_StrategyRegistry)
