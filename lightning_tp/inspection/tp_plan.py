"""The plan that transformers publishes with a model, laid next to ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from lightning_tp.inspection.folding import labels, without_indices
from lightning_tp.inspection.roles import Role
from lightning_tp.inspection.transformers_source import is_pretrained_model
from lightning_tp.plan.sharding_plan import ShardingPlan

Verdict = Literal["same", "differs", "only ours", "only theirs"]

# What a style of transformers does to a parameter: the dim that it splits, counted from the end.
_SPLIT_DIM = {
    "colwise": -2, "packed_colwise": -2, "colwise_gather_output": -2, "colwise_rep": -2,
    "rowwise": -1, "packed_rowwise": -1, "rowwise_split_input": -1, "rowwise_rep": -1,
    "embedding_rowwise": -2, "embedding_colwise": -1,
}  # fmt: skip
_EXTRA_COMMUNICATION = {
    "colwise_gather_output": "theirs gathers the output",
    "colwise_rep": "theirs gathers the output",
    "rowwise_split_input": "theirs cuts an input that every rank has whole",
    "rowwise_rep": "theirs cuts an input that every rank has whole",
}
# Styles that sum gradients or results, and leave the parameters whole.
_SUMS = {"replicated_with_grad_allreduce", "mla_kv_a_proj"}
_WHOLE, _SUMMED = "whole", "whole, gradients summed"


@dataclass(frozen=True)
class Compared:
    """One group of parameters, of the same name in every repeated block, under both plans.

    Attributes:
        name: The parameters, folded.
        ours: What our plan does.
        theirs: The style of transformers, "" if there is none.
        verdict: Whether both do the same.
        how: In what they differ.
    """

    name: str
    ours: str
    theirs: str
    verdict: Verdict
    how: str = ""


@dataclass(frozen=True)
class Comparison:
    """Both plans.

    Attributes:
        note: Why there is nothing to compare, or "".
        groups: Parameters that at least one of the plans names.
        whole: Number of parameter tensors that both leave whole.
    """

    note: str
    groups: tuple[Compared, ...] = ()
    whole: int = 0


def compare_with_tp_plan(model: nn.Module, plan: ShardingPlan, roles: dict[str, Role]) -> Comparison:
    """Compare ``plan`` with the ``tp_plan`` of the transformers models within ``model``."""
    pretrained = {name: module for name, module in model.named_modules() if is_pretrained_model(module)}
    if not pretrained:
        return Comparison(
            f"{type(model).__name__} holds no model of transformers, so it has no tp_plan to compare with."
        )
    published = _published(pretrained)
    if not published:
        names = ", ".join(dict.fromkeys(type(module).__name__ for module in pretrained.values()))
        return Comparison(f"transformers publishes no tp_plan for {names}.")
    entries = {entry.module for region in plan.regions for entry in region.entries}
    grouped: dict[tuple[str, Compared], list[str]] = {}
    used: set[str] = set()
    whole = 0
    for name, parameter in model.named_parameters():
        rule = next((key for key in _keys(name) if key in published), "")
        used.add(rule)
        ours = _ours(roles[name], name.rpartition(".")[0] in entries)
        theirs = _of_parameter(published.get(rule, ""), parameter)
        if ours == _WHOLE and not theirs:
            whole += 1
            continue
        compared = Compared("", ours, theirs, *_verdict(roles[name], ours, theirs, parameter.dim()))
        grouped.setdefault((without_indices(name), compared), []).append(name)
    groups = [replace(compared, name=label) for (_, compared), names in grouped.items() for label in labels(names)]
    groups += _of_modules({key: style for key, style in published.items() if key not in used}, model, plan)
    return Comparison("", tuple(groups), whole)


def _of_modules(styles: dict[str, str], model: nn.Module, plan: ShardingPlan) -> Iterator[Compared]:
    """Styles that say how a module communicates, and those that match nothing."""
    modules = {without_indices(name) for name, _ in model.named_modules()}
    summed = {without_indices(region.module) for region in plan.regions if region.boundary is not None}
    for key, style in styles.items():
        if key in summed:
            yield Compared(key, "sum of its results", style, "same")
        else:
            how = "it is about communication only" if key in modules else "it matches nothing in this model"
            yield Compared(key, "", style, "only theirs", how)


def _published(models: dict[str, Any]) -> dict[str, str]:
    """The styles by names in the whole model, without indices; the plan of an outer model holds those of inner ones."""
    published: dict[str, str] = {}
    for name, module in models.items():
        prefix = f"{without_indices(name)}." if name else ""
        base = getattr(module.config, "base_model_tp_plan", None) or {}
        own = module._tp_plan or (base if module.base_model is module else {})
        for key, style in own.items():
            published.setdefault(f"{prefix}{key}", style)
    return published


def _keys(parameter: str) -> tuple[str, str]:
    """The names under which a plan may hold a parameter: its own, and its module's."""
    generic = without_indices(parameter)
    return generic, generic.rpartition(".")[0]


def _of_parameter(style: str, parameter: nn.Parameter) -> str:
    """``style`` where it does something to ``parameter``, else ""; the bias of a row stays whole."""
    if _SPLIT_DIM.get(style) == -1 and parameter.dim() == 1:
        return ""
    return style if style in _SPLIT_DIM or style in _SUMS else ""


def _ours(role: Role, is_entry: bool) -> str:
    if role.dim is not None and not role.is_sharded:
        return f"{'column' if role.kind == 'column' else 'part'}, shared by ranks"
    if role.kind in ("column", "row"):
        return role.kind
    if role.dim is not None:
        return f"split along dim {role.dim}"
    return _SUMMED if role.kind == "partial" or is_entry else _WHOLE


def _verdict(role: Role, ours: str, theirs: str, dims: int) -> tuple[Verdict, str]:
    if not theirs or ours == _WHOLE:
        return ("only theirs" if theirs else "only ours"), ""
    if theirs in _SUMS or ours == _SUMMED:
        return (
            ("same", "") if theirs in _SUMS and ours == _SUMMED else ("differs", "one splits, the other sums gradients")
        )
    if theirs in _EXTRA_COMMUNICATION:
        return "differs", _EXTRA_COMMUNICATION[theirs]
    dim = 0 if dims == 1 else dims + _SPLIT_DIM[theirs]
    if dim != role.dim:
        return "differs", f"theirs splits dim {dim}, ours dim {role.dim}"
    return ("same", "") if role.is_sharded else ("differs", "ours lets ranks share parts of it")
