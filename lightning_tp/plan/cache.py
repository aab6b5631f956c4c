"""Plans that were found before, kept on disk by what the model computes."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_tp.errors import PlanError
from lightning_tp.plan.sharding_plan import FORMAT_VERSION, ShardingPlan
from lightning_tp.plan.trace import Run

_MOST_PLANS = 256
_LOG = logging.getLogger(__name__)


def cache_folder() -> Path:
    """``$LIGHTNING_TP_CACHE``, else ``lightning_tp/plans`` in the user's cache folder."""
    given = os.environ.get("LIGHTNING_TP_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_tp" / "plans"


def plan_key(model: nn.Module, run: Run, *choices: Any) -> str:
    """A name for the plan of a traced run, the same in every process.

    It covers every operation of the run with its shapes and numbers, the classes of the modules, the names of all
    parameters, the integers that a plan may change, ``choices``, and the versions of torch, of this package and of its
    plans. The seed's numbers are no part of it.
    """
    from lightning_tp import __version__

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules = [
        (name, type(module), sorted((key, value) for key, value in vars(module).items() if type(value) is int))
        for name, module in model.named_modules()
    ]
    computed = run.record.computation(range(len(run.record)), None, names)
    known = (__version__, FORMAT_VERSION, torch.__version__, choices, modules, computed)
    return hashlib.sha256(repr(_stable(known)).encode()).hexdigest()


def cached_plan(folder: Path, key: str) -> ShardingPlan | None:
    """The plan that was kept under ``key``, if there is one that can be read."""
    path = folder / f"{key}.yaml"
    try:
        return ShardingPlan.load(path) if path.is_file() else None
    except (PlanError, OSError) as error:
        _LOG.info("The cached plan %s cannot be read: %s", path, error)
        return None


def keep_plan(folder: Path, key: str, plan: ShardingPlan) -> None:
    """Keep ``plan`` under ``key``; the oldest plans make room. A folder that cannot be written is no error."""
    try:
        plan.save(folder / f"{key}.yaml")
        kept = sorted(folder.glob("*.yaml"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-_MOST_PLANS]:
            path.unlink(missing_ok=True)
    except OSError as error:
        _LOG.info("The plan cannot be kept in %s: %s", folder, error)


def _stable(value: Any) -> Any:
    """``value`` with names for functions and classes, whose own representations name addresses."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_stable, value))
    if isinstance(value, Mapping):
        return tuple((key, _stable(entry)) for key, entry in value.items())
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    owner = getattr(getattr(value, "__self__", None), "__name__", "")
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return (getattr(value, "__module__", None), owner, name or type(value).__qualname__)
