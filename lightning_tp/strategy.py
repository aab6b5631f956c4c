"""The Lightning strategy: Lightning's hooks in Lightning's order, no tensor math."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.distributed import group as _group
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_tp.checkpoint.consolidated import (
    distribute_optimizer_state,
    distribute_state_dict,
    full_optimizer_state,
    full_state_dict,
)
from lightning_tp.data_parallel import shard_data_parallel
from lightning_tp.errors import ParallelConfigError, raise_on_rank_zero, run_on_rank_zero
from lightning_tp.failure import Watchdog
from lightning_tp.launcher import ScriptLauncher
from lightning_tp.layout import DATA_AXIS, TENSOR_AXIS, AxisSize, ParallelLayout
from lightning_tp.parallel.apply import parallelize, refuse_missing_values
from lightning_tp.parallel.compile_blocks import compile_blocks
from lightning_tp.parallel.local_parameters import parallel_state
from lightning_tp.parallel.scope import Entered
from lightning_tp.parallel.summary import ParameterSummary, summarize_parameters
from lightning_tp.plan.agree import PlanSource, agreed_plan
from lightning_tp.plan.find import SearchOptions, Unsplittable
from lightning_tp.plan.sharding_plan import ShardingPlan
from lightning_tp.plan.vocabulary import VocabularyParallel

SUPPORTED_PRECISION = ("32-true", "64-true", "bf16-true", "bf16-mixed")
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class TensorParallelStrategy(ParallelStrategy):
    """Train any LightningModule tensor-parallel, and data-parallel around it.

    The module is written for one device. Before training, its split is found and proven (:func:`find_plan`) on rank
    zero and applied on every rank; what cannot be proven equal stays whole. Tensor-parallel peers work on the same
    batch; data-parallel ranks on their share of it.

    Args:
        tensor_parallel_size: Ranks that share one copy of the model. "auto" takes what ``data_parallel_size`` leaves;
            with both "auto" it is the devices of one node.
        data_parallel_size: Copies of the model, each sharded by FSDP2. "auto" takes what ``tensor_parallel_size``
            leaves; with both "auto" it is the number of nodes.
        plan: "auto" finds one; a path or a :class:`ShardingPlan` is used as it is, without running the model; a
            mapping of module name patterns to "column", "row", "split", "vocabulary" or "replicate" is found and proven
            within these limits.
        unsplittable: "error" refuses a model of which some linears could be split at other sizes only; "replicate"
            keeps them whole.
        vocabulary_parallel: Whether embeddings and output heads are split over the vocabulary: "auto" where that pays.
        plan_cache: Whether a found plan is kept in the user's cache folder (``$LIGHTNING_TP_CACHE``, else
            ``~/.cache/lightning_tp/plans``) for the next run of the same model, in which it is proven again.
        compile: Whether each repeated block is compiled after the split (a model without any as a whole); a mapping has
            the arguments of ``torch.compile``.
        timeout: Seconds after which a collective that does not end is an error.
        process_group_backend: "nccl", "gloo", ...; by default what fits the device.
        start_method: "popen" runs the script again for every rank; "fork", "spawn" and "forkserver" start processes of
            Python's multiprocessing ("fork" for notebooks).

    Raises:
        ParallelConfigError: the sizes do not fit the ranks, the devices or the model, before training begins.
    """

    strategy_name = "tensor_parallel"

    def __init__(
        self,
        tensor_parallel_size: AxisSize = "auto",
        data_parallel_size: AxisSize = "auto",
        plan: PlanSource = "auto",
        unsplittable: Unsplittable = "error",
        vocabulary_parallel: VocabularyParallel = "auto",
        plan_cache: bool = True,
        compile: bool | Mapping[str, Any] = False,
        timeout: float = 1800.0,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if unsplittable not in ("error", "replicate"):
            raise ParallelConfigError(f'unsplittable must be "error" or "replicate", not {unsplittable!r}.')
        if vocabulary_parallel not in ("auto", True, False):
            raise ParallelConfigError(
                f'vocabulary_parallel must be "auto", True or False, not {vocabulary_parallel!r}.'
            )
        if start_method not in ("popen", "spawn", "fork", "forkserver"):
            raise ParallelConfigError(
                f'start_method must be "popen", "spawn", "fork" or "forkserver", not {start_method!r}.'
            )
        if not isinstance(plan, (str, os.PathLike, Mapping, ShardingPlan)):
            raise ParallelConfigError(
                'plan must be "auto", the path of a saved plan, a ShardingPlan, or a mapping of name patterns to '
                f'"column", "row", "split", "vocabulary" or "replicate", not {plan!r}.'
            )
        if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or timeout <= 0:
            raise ParallelConfigError(f"timeout must be a positive number of seconds, not {timeout!r}.")
        self.num_nodes = 1
        self._tensor_parallel_size, self._data_parallel_size = tensor_parallel_size, data_parallel_size
        self._plan_source = plan
        self._search_options = SearchOptions(unsplittable, vocabulary_parallel, plan_cache)
        if not isinstance(compile, (bool, Mapping)):
            raise ParallelConfigError(
                f"compile must be True, False or a mapping of arguments of torch.compile, not {compile!r}."
            )
        self._compile = {} if compile is True else compile
        self._timeout = timedelta(seconds=timeout)
        self._process_group_backend = process_group_backend
        self._start_method = start_method
        self._layout: ParallelLayout | None = None
        self._device_mesh: DeviceMesh | None = None
        self._plan: ShardingPlan | None = None
        self._watchdog: Watchdog | None = None
        self._refusing = False

    # What the strategy is

    @property
    def layout(self) -> ParallelLayout:
        """The sizes of the mesh axes; known as soon as the Trainer exists."""
        if self._layout is None:
            raise RuntimeError("The layout is known once the Trainer has been created with this strategy.")
        return self._layout

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh with the axes ``dp_shard`` and ``tp``; known once processes run."""
        if self._device_mesh is None:
            raise RuntimeError("The device mesh exists once the processes run: in the setup hook and later.")
        return self._device_mesh

    @property
    def plan(self) -> ShardingPlan:
        """The plan in force; known after the strategy's setup."""
        if self._plan is None:
            raise RuntimeError("The plan is known after setup: in on_fit_start and later.")
        return self._plan

    @property
    def tensor_parallel_rank(self) -> int:
        return self.global_rank % self.layout.tensor_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        return self.global_rank // self.layout.tensor_parallel_size

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning should inject distributed samplers: with one data-parallel rank the user's order holds."""
        return self._layout is not None and self._layout.data_parallel_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.layout.data_parallel_size, "rank": self.data_parallel_rank}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    def parameter_summary(self) -> ParameterSummary:
        """Numbers of parameters after the split."""
        assert self.lightning_module is not None
        return summarize_parameters(self.lightning_module, self.plan)

    # Processes

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        try:
            self._layout = ParallelLayout.resolve(
                self._tensor_parallel_size, self._data_parallel_size, self.num_processes, self.num_nodes
            )
            self._check_precision()
        except ParallelConfigError as error:
            raise_on_rank_zero(error, self.node_rank * self.num_processes + self.local_rank)
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)

    def _check_precision(self) -> None:
        precision = self.precision_plugin.precision
        if precision not in SUPPORTED_PRECISION:
            raise ParallelConfigError(
                f"Trainer(precision={precision!r}) is not supported with {type(self).__name__} yet. "
                f"Supported: {', '.join(SUPPORTED_PRECISION)}."
            )

    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self._set_world_ranks()
        assert self.cluster_environment is not None
        device = self.root_device
        self._process_group_backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            device
        )
        _init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device if device.type == "cuda" else None,
        )
        if self._watchdog is None:
            self._watchdog = Watchdog(self.global_rank, self.world_size)
        self._watchdog.start()
        if self._device_mesh is None:
            self._device_mesh = self.layout.device_mesh(device.type)
        self._share_random_state()

    def _set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _share_random_state(self) -> None:
        """Peers draw the same numbers from here on, also in a run that nobody seeded."""
        python, numpy, cpu = self.broadcast((random.getstate(), np.random.get_state(), torch.get_rng_state()))
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if self.root_device.type == "cuda":
            torch.cuda.set_rng_state(self.broadcast(torch.cuda.get_rng_state(self.root_device)), self.root_device)

    def teardown(self) -> None:
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        if self._watchdog is not None:
            self._watchdog.stop()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def on_exception(self, exception: BaseException) -> None:
        if self._watchdog is not None and not self._refusing:
            self._watchdog.report_failure(exception)

    # The model

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self._check_model(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()

        self._plan = self._agreed_plan(trainer)
        parallelize(self.model, self.device_mesh, self._plan)
        if self._compile is not False:
            compile_blocks(self.model, self._compile)
        shard_data_parallel(self.model, self.device_mesh, _STEPS)
        self._sync_metrics_over_data_parallel_ranks()
        if self.layout.data_parallel_size == 1:
            # Every rank holds the value of all samples: there is nothing to synchronise.
            warnings.filterwarnings("ignore", message="It is recommended to use `self.log", category=UserWarning)
        else:
            # What FSDP gathers in inference mode could not be used in training after it.
            trainer.validate_loop.inference_mode = False
            trainer.test_loop.inference_mode = False
            trainer.predict_loop.inference_mode = False

        self._share_random_state()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _check_model(self, model: nn.Module) -> None:
        self._refusing = True
        run_on_rank_zero(lambda: refuse_missing_values(model))
        self._refusing = False

    def _agreed_plan(self, trainer: pl.Trainer) -> ShardingPlan:
        # An error of planning is rank zero's to tell; the other ranks leave without a word and are no failure.
        self._refusing = True
        plan = agreed_plan(trainer, self.layout, self._plan_source, self._search_options)
        self._refusing = False
        return plan

    def _sync_metrics_over_data_parallel_ranks(self) -> None:
        """Tensor-parallel peers hold the same samples: counting them once is counting over the data-parallel axis."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, Metric) and module.process_group is None:
                module.process_group = self._data_group

    @contextmanager
    def _step(self) -> Generator[None, None, None]:
        """Code inside reads local parameters."""
        assert self.lightning_module is not None
        state = parallel_state(self.lightning_module)
        assert state is not None
        with Entered(state.scope):
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().predict_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        with self._step():  # activation checkpointing runs the model again here
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    # Communication

    @property
    def _data_group(self) -> dist.ProcessGroup:
        return self.device_mesh[DATA_AXIS].get_group()

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup:
        return self.device_mesh[TENSOR_AXIS].get_group()

    def barrier(self, name: str | None = None) -> None:
        if not _distributed_is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not _distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src, group=_group.WORLD)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks: tensor-parallel peers hold copies of the same value."""
        if isinstance(tensor, Tensor):
            return _sync_ddp_if_available(tensor, group or self._data_group, reduce_op=reduce_op)
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather ``[...]`` of each data-parallel rank into ``[data_parallel_size, ...]``."""
        return super().all_gather(tensor, group=group or self._data_group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        votes = _sync_ddp_if_available(votes, _group.WORLD, reduce_op="sum")
        return bool(votes == self.world_size) if all else bool(votes > 0)

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors, as one device would save them. Collective."""
        assert self.lightning_module is not None
        return full_state_dict(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        state_dict = distribute_state_dict(self.lightning_module, checkpoint["state_dict"])
        self.lightning_module.load_state_dict(state_dict, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole tensors, as one device would save them. Collective."""
        return full_optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state_dict in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(distribute_optimizer_state(optimizer, state_dict))
        _optimizers_to_device(self.optimizers, self.root_device)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork")):
            strategy_registry.register(
                cls.strategy_name + suffix,
                cls,
                description=f"Tensor parallelism over the devices of a node, processes started by {start_method}",
                override=True,
                start_method=start_method,
            )
