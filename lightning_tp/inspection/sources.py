"""How a model is named on the command line, and built."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from lightning_tp.errors import ParallelConfigError
from lightning_tp.inspection.subject import InspectError, Subject, in_words, near_misses, with_inputs
from lightning_tp.inspection.transformers_source import example_inputs, is_pretrained_model, transformers_model
from lightning_tp.plan.example import example_run
from lightning_tp.verify import composed, config_folder

_FORMS = (
    "package.module:Factory (a callable without arguments), hf:NAME (a config file or folder, a config class or a "
    "model type of transformers), or recipe:OVERRIDE (a Hydra config)"
)


@contextlib.contextmanager
def opened(arguments: argparse.Namespace, overrides: Sequence[str]) -> Iterator[Subject]:
    """The model that ``arguments.model`` names, for as long as the context lasts. It lives on the CPU.

    Raises:
        InspectError: there is no such model, it cannot be built, or nothing says what to run it on.
    """
    kind, colon, name = str(arguments.model).partition(":")
    if kind == "recipe":
        with _recipe(arguments, [*([name] if name else []), *overrides]) as subject:
            yield subject
        return
    if not colon or not kind or not name:
        raise InspectError(f"{arguments.model!r} names no model. It must be {_FORMS}.")
    torch.manual_seed(0)
    if kind == "hf":
        model = transformers_model(name, overrides)
        yield _subject(model, arguments, lambda: with_inputs(model, example_inputs(model)))
        return
    if overrides:
        raise InspectError(f"{overrides[0]}: overrides go with hf:... and recipe:..., and {arguments.model} has none.")
    with _importable(os.getcwd()):
        yield _made(arguments)


def _subject(model: nn.Module, arguments: argparse.Namespace, otherwise: Callable[[], Subject]) -> Subject:
    """``model`` with the inputs of ``--inputs``, without them what ``otherwise`` gives."""
    if arguments.inputs is None:
        return otherwise()
    with _importable(os.getcwd()):
        return with_inputs(model, _called(arguments.inputs, "--inputs"))


@contextlib.contextmanager
def _importable(*folders: str) -> Iterator[None]:
    before = list(sys.path)
    sys.path[:0] = folders
    try:
        yield
    finally:
        sys.path[:] = before


def _made(arguments: argparse.Namespace) -> Subject:
    """What a factory gives, with inputs from the first of the ways that there is."""
    made = _called(arguments.model, "MODEL")
    model, given = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InspectError(
            f"{arguments.model} gave {type(made).__name__}. It must return an nn.Module, or a tuple "
            "(nn.Module, example_inputs)."
        )
    return _subject(model, arguments, lambda: _with_own_inputs(model, given))


def _with_own_inputs(model: nn.Module, given: Any) -> Subject:
    for inputs in (getattr(model, "example_input_array", None), given):
        if inputs is not None:
            return with_inputs(model, inputs)
    if is_pretrained_model(model):
        return with_inputs(model, example_inputs(model))
    raise InspectError(
        f"nothing says what {type(model).__name__} is run on. Do one of four things: set example_input_array on the "
        "LightningModule; let the factory return (module, example_inputs); give --inputs package.module:Callable; or "
        "inspect a PreTrainedModel of transformers, whose inputs are generated."
    )


def _called(target: str, what: str) -> Any:
    """The result of the callable ``package.module:name``."""
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise InspectError(f"{what} is {target!r}. It must be package.module:name, with a callable without arguments.")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InspectError(
            f"{what} {target}: {error}. Run this from the folder that holds the module, or install its package."
        ) from error
    except Exception as error:
        raise InspectError(f"{what} {target}: the module does not import: {in_words(error)}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")]
            raise InspectError(f"{what} {target}: there is no {part} in {module_name}.{near_misses(part, public)}")
        found = getattr(found, part)
    if not callable(found) or isinstance(found, nn.Module):
        raise InspectError(f"{what} {target} is a {type(found).__name__}, not a callable that makes what is asked for.")
    try:
        return found()
    except Exception as error:
        raise InspectError(f"{what} {target} could not be called without arguments: {in_words(error)}") from error


@contextlib.contextmanager
def _recipe(arguments: argparse.Namespace, overrides: Sequence[str]) -> Iterator[Subject]:
    """The model of a Hydra config, and its example_input_array or a batch of the config's data."""
    folder = config_folder(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="lightning-tp-inspect-") as work,
        # A Hydra app finds its modules beside its script, which lies beside or above the config.
        _importable(str(folder.parent), os.getcwd()),
        composed(folder, arguments.config_name, overrides, Path(work), job_name="inspect") as config,
    ):
        pl.seed_everything(int(config.get("seed") or 0), workers=True, verbose=False)
        model = _instantiated(config, "model")
        if not isinstance(model, pl.LightningModule):
            raise InspectError(f"`model` of the config is a {type(model).__name__}, not a LightningModule.")
        yield _subject(model, arguments, lambda: _on_own_data(model, config, Path(work)))


def _instantiated(config: DictConfig, key: str) -> Any:
    node = config.get(key)
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise InspectError(
            f"the config has no `{key}` with a `_target_`. Add it, or choose another with --config-name."
        )
    try:
        return instantiate(node)
    except (HydraException, OmegaConfBaseException) as error:
        raise InspectError(f"`{key}` of the config could not be built: {error}") from error


class _KeepsRun(pl.Callback):
    """Takes the run that a strategy would plan with, when the Trainer has set model and data up."""

    run: Any = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run = example_run(trainer)


def _on_own_data(model: pl.LightningModule, config: DictConfig, folder: Path) -> Subject:
    """``model`` on its example_input_array, or as ``training_step`` on a batch of the config's data."""
    if model.example_input_array is not None:
        return with_inputs(model, model.example_input_array)
    keeper = _KeepsRun()
    data = _instantiated(config, "data")
    try:
        with _trainer_silent():
            _trainer(keeper, folder).fit(model, datamodule=data)
    except ParallelConfigError:
        raise
    except Exception as error:
        raise InspectError(f"the config's model and data could not be set up: {in_words(error)}") from error
    return Subject(model, keeper.run)


@contextlib.contextmanager
def _trainer_silent() -> Iterator[None]:
    """Nothing is trained that the Trainer could tell of."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _trainer(callback: pl.Callback, folder: Path) -> pl.Trainer:
    """A Trainer that sets model and data up, and takes no step."""
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=0,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        default_root_dir=folder,
    )
