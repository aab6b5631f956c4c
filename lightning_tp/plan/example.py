"""What the model is run on to plan its split: ``example_input_array``, or a batch of its own data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from lightning_tp.errors import ParallelConfigError
from lightning_tp.plan.state import random_state_kept

_SAMPLES = 2
"""Samples of the probe's batch: more than one, for code that normalises over the batch."""

_REMEDY = (
    "Set example_input_array on the LightningModule (a tensor, a tuple of arguments or a dict of keyword arguments for "
    "its forward), or give the strategy a saved plan: TensorParallelStrategy(plan='plan.yaml')."
)
_STEPS = {
    TrainerFn.FITTING: ("training_step", "fit_loop"),
    TrainerFn.VALIDATING: ("validation_step", "validate_loop"),
    TrainerFn.TESTING: ("test_step", "test_loop"),
    TrainerFn.PREDICTING: ("predict_step", "predict_loop"),
}


def example_run(trainer: pl.Trainer) -> Callable[[], Any]:
    """A call that runs the trainer's LightningModule once, on its device, without logging or communicating.

    Raises:
        ParallelConfigError: no input can be had; the message says what to set.
    """
    module = trainer.lightning_module
    strategy = trainer.strategy
    if module.example_input_array is not None:
        example = strategy.batch_to_device(strategy.precision_plugin.convert_input(module.example_input_array))

        def step() -> Any:
            with strategy.precision_plugin.forward_context():
                if isinstance(example, dict):
                    return module(**example)
                return module(*example) if isinstance(example, (tuple, list)) else module(example)

    else:
        step = _step_on_own_data(trainer)

    def run() -> Any:
        with _quiet(trainer) as logged, _NoCollectives():
            return step(), logged

    return run


def _step_on_own_data(trainer: pl.Trainer) -> Callable[[], Any]:
    module, strategy = trainer.lightning_module, trainer.strategy
    function = trainer.state.fn
    if function not in _STEPS:
        raise ParallelConfigError(f"There is nothing to run the model on for {function}. {_REMEDY}")
    name, loop = _STEPS[function]
    method = getattr(module, name)
    if name == "training_step" and not module.automatic_optimization:
        raise ParallelConfigError(
            f"training_step optimizes manually, so it cannot be run before the optimizers exist. {_REMEDY}"
        )
    if is_param_in_hook_signature(method, "dataloader_iter", explicit=True):
        raise ParallelConfigError(f"{name} takes an iterator, not a batch. {_REMEDY}")
    source = getattr(trainer, loop)._data_source
    if source.instance is None or not source.is_defined():
        raise ParallelConfigError(f"There is no data to run {name} on. {_REMEDY}")
    with random_state_kept():
        batch = strategy.precision_plugin.convert_input(
            _first_batches(source.dataloader(), in_turn=name != "training_step")
        )
        batch = strategy.batch_to_device(module._on_before_batch_transfer(batch, dataloader_idx=0), dataloader_idx=0)
    arguments = [batch, 0] if is_param_in_hook_signature(method, "batch_idx", min_args=2) else [batch]
    context = {
        "training_step": strategy.precision_plugin.train_step_context,
        "validation_step": strategy.precision_plugin.val_step_context,
        "test_step": strategy.precision_plugin.test_step_context,
        "predict_step": strategy.precision_plugin.predict_step_context,
    }[name]

    def step() -> Any:
        with context():
            return method(*arguments)

    return step


def _first_batches(loaders: Any, in_turn: bool) -> Any:
    """The first batch of a loader. For a collection of loaders, the collection of their first batches, or the first
    loader's where the Trainer takes them one after the other (``in_turn``)."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    if in_turn:
        return _first_batch(combined.flattened[0])
    return tree_unflatten([_first_batch(loader) for loader in combined.flattened], combined._spec)


def _first_batch(loader: Any) -> Any:
    """The first samples of ``loader``, collated; nothing that the loader will give in training is used up."""
    if not isinstance(loader, DataLoader):
        return _first_of(loader)
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        if loader.batch_size is None:
            return loader.collate_fn(_first_of(dataset))
        samples = list(islice(iter(_copied(dataset)), min(loader.batch_size, _SAMPLES)))
        if not samples:
            raise ParallelConfigError(f"The training data is empty. {_REMEDY}")
        return loader.collate_fn(samples)
    with _generators_kept(loader):
        index = next(iter(loader._index_sampler), None)
    if index is None:
        raise ParallelConfigError(f"The training data is empty. {_REMEDY}")
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[index])
    return loader.collate_fn([dataset[entry] for entry in list(index)[:_SAMPLES]])


def _first_of(iterable: Iterable[Any]) -> Any:
    first = next(iter(iterable if isinstance(iterable, (list, tuple)) else _copied(iterable)), None)
    if first is None:
        raise ParallelConfigError(f"The training data is empty. {_REMEDY}")
    return first


def _copied(iterable: Any) -> Any:
    try:
        return copy.deepcopy(iterable)
    except Exception as error:
        raise ParallelConfigError(
            f"A batch cannot be taken from a {type(iterable).__name__} without using it up: {error}. {_REMEDY}"
        ) from error


@contextmanager
def _generators_kept(loader: DataLoader[Any]) -> Iterator[None]:
    holders = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    generators = [g for g in (getattr(holder, "generator", None) for holder in holders) if g is not None]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def _quiet(trainer: pl.Trainer) -> Iterator[list[Any]]:
    """Nothing is logged: ``self.logger`` swallows what it is given, ``self.log`` only adds it to the list yielded."""
    logged: list[Any] = []
    modules = [m for m in trainer.lightning_module.modules() if isinstance(m, pl.LightningModule)]
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    for module in modules:
        vars(module)["log"] = vars(module)["log_dict"] = lambda *args, **kwargs: logged.append((args, kwargs))
    try:
        yield logged
    finally:
        trainer.loggers = loggers
        for module in modules:
            vars(module).pop("log")
            vars(module).pop("log_dict")


class _NoCollectives(TorchDispatchMode):
    """Only rank zero plans: a collective would wait for ranks that do not come."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "namespace", "") in ("c10d", "_c10d_functional"):
            raise ParallelConfigError(
                f"The model communicates with other ranks ({function}) in the step that plans its split. {_REMEDY}"
            )
        return function(*args, **(kwargs or {}))
