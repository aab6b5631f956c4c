"""Apply a plan to a model: every parameter becomes a DTensor, every module reads local tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_tp.errors import ParallelConfigError, PlanError
from lightning_tp.layout import TENSOR_AXIS
from lightning_tp.parallel.linear import (
    BoundaryParallel,
    BoundaryRole,
    ColumnParallel,
    ColumnRole,
    EntryLinear,
    EntryRole,
    NormRole,
    ParallelNorm,
    RegionModule,
    RegionRole,
    RowParallel,
    RowRole,
    SharedCopy,
)
from lightning_tp.parallel.local_parameters import (
    LocalAttributes,
    LocalRead,
    ParallelState,
    local_tensor,
    parallel_state,
    rewrite,
)
from lightning_tp.parallel.random import RankRandomness
from lightning_tp.parallel.scope import Scope
from lightning_tp.parallel.torch_modules import local_forward, without_fused_paths
from lightning_tp.parallel.vocabulary import VocabularyEmbedding, VocabularyHead, VocabularyRole, local_padding
from lightning_tp.plan.arguments import positional_names
from lightning_tp.plan.linears import feature_changes, linear_adapter
from lightning_tp.plan.norms import Norm, recognised_norm
from lightning_tp.plan.sharding_plan import Column, Region, ShardingPlan, Split, word_ranges


@dataclass(frozen=True)
class Holding:
    """How a parameter is held on the ``tp`` axis and read by this rank."""

    placement: Placement
    indices: tuple[int, Tensor] | None = None
    """Dim and indices of this rank's part of the global tensor; None for a replicated parameter."""
    read_rows: bool = False
    """The whole parameter is held, and the rows of ``indices`` are read."""
    partial: bool = False
    """Gradients are partial sums over ``tp``."""
    counts: bool = True
    """Whether this rank counts the parameter; if not it reads zeros."""


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: ShardingPlan) -> nn.Module:
    """Rewrite ``model`` in place so that it computes what it computed, on the ranks of ``mesh``'s ``tp`` axis.

    The values of rank zero are taken everywhere. All parameters become DTensors on the ``tp`` axis, with their names,
    global shapes and ``requires_grad`` kept, and tied parameters tied. A model that already follows ``plan`` is left
    as it is. Collective over the default process group.

    Args:
        model: The plain model, on this rank's device.
        mesh: A mesh with an axis ``tp``.
        plan: A plan for this model and the size of that axis.

    Returns:
        ``model``.

    Raises:
        PlanError: the plan is for another size or another model.
        ParallelConfigError: the model has parameters without values, or keeps references to them that would go stale.
    """
    done = parallel_state(model)
    if done is not None:
        return model
    tensor_mesh = mesh[TENSOR_AXIS] if mesh.ndim > 1 else mesh
    refuse_missing_values(model)
    check_plan(model, plan, tensor_mesh.size())
    refuse_hidden_references(model)
    broadcast_from_rank_zero(model)
    holdings = _holdings(model, plan, tensor_mesh, data_parallel=mesh.size() // tensor_mesh.size())
    split_norms = [name for region in plan.regions for name in region.norms]
    norms: dict[str, Any] = {name: recognised_norm(model.get_submodule(name)) for name in split_norms}
    _distribute_parameters(model, holdings, tensor_mesh)
    sizes = (mesh.size() // tensor_mesh.size(), tensor_mesh.size())
    _rewrite_modules(model, plan, holdings, norms, tensor_mesh, sizes)
    return model


def check_plan(model: nn.Module, plan: ShardingPlan, size: int) -> None:
    """Raise a :class:`PlanError` unless ``plan`` fits the linears of ``model`` and ``size`` ranks."""
    if plan.tensor_parallel_size != size:
        raise PlanError(
            f"The plan is for tensor_parallel_size={plan.tensor_parallel_size}, this run has {size}. "
            'Find a new one with plan="auto".'
        )
    modules = dict(model.named_modules())
    named: list[tuple[str, Column | None]] = [(column.module, column) for _, column in plan.columns()]
    named += [(row, None) for region in plan.regions for row in region.rows]
    missing = [name for name, _ in named if name not in modules]
    if missing:
        none = " None of its modules is in this model." if len(missing) == len(named) else ""
        raise PlanError(
            f"The plan names modules that this model does not have: {', '.join(missing[:5])}"
            f"{' ...' if len(missing) > 5 else ''}.{none} It was made for another model; find a new one with "
            'plan="auto".'
        )
    for name, column in named:
        adapter = linear_adapter(modules[name])
        if adapter is None:
            raise PlanError(f"The plan splits {name}, which is a {type(modules[name]).__name__} and no plain linear.")
        weight: Any = modules[name]._parameters["weight"]
        if column is not None:
            rows = {row for rank in range(size) for row in column.row_indices(rank)}
            if rows != set(range(weight.shape[adapter.output_dim])):
                raise PlanError(
                    f"The plan's rows for {name} are not the {weight.shape[adapter.output_dim]} output features that "
                    "it has here."
                )
        elif weight.shape[adapter.input_dim] % size:
            raise PlanError(
                f"{size} ranks do not divide the {weight.shape[adapter.input_dim]} input features of {name}."
            )
    _check_parameters(model, plan, size)


def _check_parameters(model: nn.Module, plan: ShardingPlan, size: int) -> None:
    """As :func:`check_plan`, for what a region names beside its columns and rows."""
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    for region in plan.regions:
        named = [*region.partial, *(shard.parameter for shard in region.shards)]
        missing = [name for name in named if name not in parameters]
        others = [region.module, *region.norms, *(entry.module for entry in region.entries)]
        missing += [name for name in others if name not in modules]
        if missing:
            raise PlanError(
                f"The plan names {', '.join(missing[:5])}, which this model does not have. It was made for another "
                'model; find a new one with plan="auto".'
            )
        for shard in region.shards:
            shape = parameters[shard.parameter].shape
            rows = {row for rank in range(size) for row in shard.row_indices(rank)}
            if shard.dim >= len(shape) or rows != set(range(shape[shard.dim])):
                raise PlanError(f"The plan's parts of {shard.parameter} are not those of its shape {tuple(shape)}.")
        for name in region.norms:
            if recognised_norm(modules[name]) is None:
                raise PlanError(f"The plan splits the normalisation {name}, which is none that is known.")
        if region.vocabulary is not None:
            _check_vocabulary(model, region, size)
        if region.boundary is not None and region.found_by == "adapter" and not local_forward(modules[region.module]):
            raise PlanError(f"The plan splits {region.module} in a way that its class has not.")


def _check_vocabulary(model: nn.Module, region: Region, size: int) -> None:
    """Raise unless all holders of the table of ``region`` take part, and each rank has the words that it must have."""
    assert region.vocabulary is not None
    parameters = dict(model.named_parameters())
    table = parameters[region.shards[0].parameter] if region.shards else None
    members = region.vocabulary.members
    holders = {name for name, module in model.named_modules() if any(p is table for p in module._parameters.values())}
    if table is None or holders != set(members):
        raise PlanError(f"The plan splits the words of {', '.join(members)}, but {sorted(holders)} hold the table.")
    for shard in region.shards:
        if shard.dim != 0 or shard.rows != word_ranges(table.shape[0], size):
            raise PlanError(f"The plan's words of {shard.parameter} are not those that {size} ranks have.")
    for name in region.vocabulary.heads:
        adapter = linear_adapter(model.get_submodule(name))
        if adapter is None or adapter.output_dim != 0:
            raise PlanError(f"The plan splits the words of {name}, which is no plain linear.")


def refuse_missing_values(model: nn.Module) -> None:
    """Raise for parameters and buffers on the meta device."""
    missing = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if missing:
        raise ParallelConfigError(
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}: on the meta device, without values. A plan "
            "can be found for such a model; to run, build it without torch.device('meta') and parameters_on_meta(), or "
            "give it values in configure_model (to_empty, then reset_parameters)."
        )


def refuse_hidden_references(model: nn.Module) -> None:
    """Raise where a module keeps a parameter in a plain attribute, or a hook on one: both would miss the new one."""
    parameters = {id(p): name for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_modules", "_buffers") or attribute == "_flat_weights":
                continue
            for entry in _contents(value):
                if id(entry) in parameters:
                    raise ParallelConfigError(
                        f"{name or 'the model'} keeps the parameter {parameters[id(entry)]} in its plain attribute "
                        f"{attribute}, which would not follow when the parameter is split. Read the parameter from its "
                        "module instead, or build that attribute in configure_optimizers or later."
                    )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ParallelConfigError(f"{name} has a gradient hook; register it in on_fit_start, after the split.")


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set)):
        yield from value
    else:
        yield value


@torch.no_grad()
def broadcast_from_rank_zero(model: nn.Module) -> None:
    """Give every rank rank zero's parameters and buffers, so that an unseeded model is the same model everywhere."""
    if dist.get_world_size() == 1:
        return
    seen: set[int] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in seen and tensor.numel():
            seen.add(id(tensor))
            value = tensor.detach().contiguous()
            # As bytes: backends do not know every dtype.
            real = torch.view_as_real(value) if value.is_complex() else value
            dist.broadcast(real.view(-1).view(torch.uint8), src=0)
            if value.data_ptr() != tensor.data_ptr():
                tensor.copy_(value)


def _holdings(model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, data_parallel: int) -> dict[int, Holding]:
    """The holding of every parameter, by its id."""
    holdings = {id(parameter): Holding(Replicate()) for parameter in model.parameters()}
    parameters = dict(model.named_parameters())
    rank = mesh.get_local_rank()
    for region in plan.regions:
        for column in region.columns:
            module = model.get_submodule(column.module)
            adapter: Any = linear_adapter(module)
            for key, dim in (("weight", adapter.output_dim), ("bias", 0)):
                parameter = module._parameters.get(key)
                if parameter is not None:
                    holdings[id(parameter)] = _split_holding(parameter, column, dim, rank, data_parallel)
        for row in region.rows:
            module = model.get_submodule(row)
            adapter = linear_adapter(module)
            weight: Any = module._parameters["weight"]
            share = weight.shape[adapter.input_dim] // mesh.size()
            index = torch.arange(rank * share, (rank + 1) * share, device=weight.device)
            holdings[id(weight)] = Holding(Shard(adapter.input_dim), (adapter.input_dim, index))
        for shard in region.shards:
            parameter = parameters[shard.parameter]
            holdings[id(parameter)] = _split_holding(parameter, shard, shard.dim, rank, data_parallel)
        once = region.boundary.once if region.boundary is not None else ()
        for name in region.partial:
            holdings[id(parameters[name])] = Holding(Replicate(), partial=True, counts=rank == 0 or name not in once)
    return holdings


def _split_holding(parameter: Tensor, split: Split, dim: int, rank: int, data_parallel: int) -> Holding:
    indices = (dim, torch.tensor(split.row_indices(rank), device=parameter.device))
    placement = split_placement(split, parameter.shape[dim], dim)
    uneven = len({len(split.row_indices(rank)) for rank in range(len(split.rows))}) > 1
    if (isinstance(placement, _StridedShard) or uneven) and data_parallel > 1 and dim == 0:
        # FSDP shards dim 0 again, and torch cannot put that back in order; another dim it can.
        other = 1 - dim
        if parameter.dim() < 2 or parameter.shape[other] % data_parallel:
            placement = None
    if placement is None:
        return Holding(Replicate(), indices, read_rows=True, partial=True)
    return Holding(placement, indices)


def split_placement(split: Split, features: int, dim: int) -> Placement | None:
    """The DTensor placement whose local tensors are the ranks' rows; None where torch has none."""
    size = len(split.rows)
    if not split.is_sharded:
        return None
    share = -(-features // size)
    if all(ranges == ((rank * share, min((rank + 1) * share, features)),) for rank, ranges in enumerate(split.rows)):
        return Shard(dim)
    for sections in range(1, max(len(ranges) for ranges in split.rows) + 1):
        if features % (size * sections):
            continue
        length = features // (size * sections)
        expected = [
            [start + i for start in range(rank * length, features, size * length) for i in range(length)]
            for rank in range(size)
        ]
        if all(split.row_indices(rank) == expected[rank] for rank in range(size)):
            return Shard(dim) if sections == 1 else _StridedShard(dim, split_factor=sections)
    return None


@torch.no_grad()
def _distribute_parameters(model: nn.Module, holdings: dict[int, Holding], mesh: DeviceMesh) -> None:
    """Replace every parameter by a DTensor that holds this rank's part. Tied parameters stay tied."""
    replaced: dict[int, nn.Parameter] = {}
    old: list[nn.Parameter] = []  # kept alive: a freed parameter's id could be given to a new one
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in replaced:
                replaced[id(parameter)] = _distributed(parameter, holdings[id(parameter)], mesh)
                holdings[id(replaced[id(parameter)])] = holdings[id(parameter)]
                old.append(parameter)
            module._parameters[key] = replaced[id(parameter)]


def _distributed(parameter: nn.Parameter, holding: Holding, mesh: DeviceMesh) -> nn.Parameter:
    value = parameter.detach()
    if not isinstance(holding.placement, Replicate) and holding.indices is not None:
        value = value.index_select(*holding.indices)
    tensor = DTensor.from_local(
        value.contiguous(),
        mesh,
        [holding.placement],
        run_check=False,
        shape=parameter.shape,
        stride=torch.empty(parameter.shape, device="meta").stride(),
    )
    distributed = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    for name, attribute in vars(parameter).items():
        setattr(distributed, name, attribute)
    return distributed


def _rewrite_modules(
    model: nn.Module,
    plan: ShardingPlan,
    holdings: dict[int, Holding],
    norms: Mapping[str, Norm],
    mesh: DeviceMesh,
    mesh_sizes: tuple[int, int],
) -> None:
    """Give every module that owns parameters, holds a region or changes an attribute its generated class."""
    group = mesh.get_group()
    scope = Scope()
    states = {name: ParallelState(scope) for name, module in model.named_modules() if module._parameters}
    root = states.setdefault("", ParallelState(scope))
    root.plan, root.mesh_sizes = plan, mesh_sizes
    for name, state in states.items():
        for key, parameter in model.get_submodule(name)._parameters.items():
            if parameter is not None:
                holding = holdings[id(parameter)]
                rows = holding.indices if holding.read_rows else None
                state.reads[key] = LocalRead(group, holding.partial, rows, holding.counts)
    for name, module in model.named_modules():
        fixed = without_fused_paths(module)
        if fixed:
            states.setdefault(name, ParallelState(scope)).attributes.append(LocalAttributes(scope, fixed))
    mixins: dict[str, list[type]] = {}
    by_module: dict[str, list[_RunningRegion]] = {}
    scopes: dict[str, Scope] = {}
    for region in plan.regions:
        running = _RunningRegion(model, region, mesh, group, scopes.setdefault(region.module, Scope()))
        if region.vocabulary is None:
            by_module.setdefault(region.module, []).append(running)
        for name, role, mixin in running.roles(model):
            states.setdefault(name, ParallelState(scope)).role = role
            mixins.setdefault(name, []).append(mixin)
        for name, role, mixin, changed in running.words(model):
            states.setdefault(name, ParallelState(scope)).role = role
            states[name].attributes.append(LocalAttributes(role.scope, changed))
            mixins.setdefault(name, []).append(mixin)
        for entry in region.entries:
            features = torch.tensor(entry.row_indices(0), device=running.device)
            states[entry.module].entry = EntryRole(group, features)
            mixins.setdefault(entry.module, []).insert(0, EntryLinear)  # outside of what else the linear is
        for name in region.norms:
            states[name].role = NormRole(group, norms[name])
            mixins.setdefault(name, []).append(ParallelNorm)
        for module_name, values in _local_values(model, region, mesh.get_local_rank()).items():
            state = states.setdefault(module_name, ParallelState(scope))
            state.attributes.append(LocalAttributes(running.scope, values))
    for name, regions in by_module.items():
        names = positional_names(model.get_submodule(name))
        states.setdefault(name, ParallelState(scope)).region = _region_role(name, names, regions)
        mixins.setdefault(name, []).insert(0, RegionModule)  # its arguments are cut before anything else sees them
    for name, state in states.items():
        rewrite(model.get_submodule(name), state, tuple(mixins.get(name, ())))


class _RunningRegion:
    """What the modules of one region share while they run."""

    def __init__(
        self, model: nn.Module, region: Region, mesh: DeviceMesh, group: dist.ProcessGroup, scope: Scope
    ) -> None:
        self.region, self.group, self.rank, self.size = region, group, mesh.get_local_rank(), mesh.size()
        self.device = next((local_tensor(p).device for p in model.parameters()), torch.device("cpu"))
        self.scope = scope
        self.copies = SharedCopy(group, sum(len(names) for names in region.inputs))
        rows = max(len(region.rows), 1)
        self.randomness = RankRandomness(self.rank, self.device, rows) if region.random else None

    def roles(self, model: nn.Module) -> Iterator[tuple[str, Any, type]]:
        """Name, role and mixin of every module that takes part."""
        region = self.region
        for column in region.columns:
            yield column.module, ColumnRole(self.copies, self.randomness), ColumnParallel
        for name in region.rows:
            adapter: Any = linear_adapter(model.get_submodule(name))
            yield name, RowRole(self.group, adapter, self.randomness), RowParallel
        if region.boundary is not None:
            function = local_forward(model.get_submodule(region.module)) if region.found_by == "adapter" else None
            role = BoundaryRole(self.group, self.rank, self.size, function, self.randomness)
            yield region.module, role, BoundaryParallel

    def words(self, model: nn.Module) -> Iterator[tuple[str, VocabularyRole, type, dict[str, Any]]]:
        """Name, role, mixin and local attributes of the modules that share a table of words."""
        if self.region.vocabulary is None:
            return
        table = self.region.shards[0]
        ((first, stop),) = table.rows[self.rank]
        words = max(last for ((_, last),) in table.rows)
        for name in self.region.vocabulary.embeddings:
            padding = local_padding(getattr(model.get_submodule(name), "padding_idx", None), first, stop)
            role = VocabularyRole(self.group, first, stop, words, Scope())
            yield name, role, VocabularyEmbedding, {"padding_idx": padding}
        for name in self.region.vocabulary.heads:
            yield name, VocabularyRole(self.group, first, stop, words, Scope()), VocabularyHead, {}


def _region_role(name: str, argument_names: list[str], regions: list[_RunningRegion]) -> RegionRole:
    if len({running.region.sizes for running in regions}) > 1:
        raise PlanError(f"The regions of {name or 'the model'} must have the same rules for sizes.")
    if len({running.region.arguments for running in regions}) > 1:
        raise PlanError(f"The regions of {name or 'the model'} must slice the same arguments.")
    return RegionRole(
        name,
        regions[0].group,
        regions[0].rank,
        regions[0].scope,
        regions[0].region.sizes,
        regions[0].region.arguments,
        tuple(argument_names),
        tuple(running.copies for running in regions),
        tuple(running.randomness for running in regions if running.randomness is not None),
    )


def _local_values(model: nn.Module, region: Region, rank: int) -> dict[str, dict[str, Any]]:
    """For each module the attributes that have another value inside ``region``, with that value."""
    changes = list(region.attributes)
    if region.columns:
        changes += feature_changes(model, region.columns, region.rows, rank)
    values: dict[str, dict[str, Any]] = {}
    for change in changes:
        attributes = vars(model.get_submodule(change.module))
        local = values.setdefault(change.module, {})
        holder, _, field = change.attribute.rpartition(".")
        if not holder:
            local[field] = change.value
            continue
        if holder not in local:
            local[holder] = copy.copy(attributes[holder])
        vars(local[holder])[field] = change.value
    return values
