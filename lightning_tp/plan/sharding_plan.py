"""The sharding plan: which parameters are split along which dim, and where data is copied or reduced."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_tp.errors import PlanError

FORMAT_VERSION = 3

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges ``(start, stop)`` of the output rows of a linear, ascending."""


@dataclass(frozen=True)
class Split:
    """Which indices along one dim of a tensor each rank has.

    Attributes:
        rows: For each rank the ranges of indices.
    """

    rows: tuple[Ranges, ...]

    def row_indices(self, rank: int) -> list[int]:
        """The indices of ``rank``, ascending."""
        return [row for start, stop in self.rows[rank] for row in range(start, stop)]

    @property
    def is_sharded(self) -> bool:
        """Whether no row belongs to two ranks."""
        ranges = sorted(pair for per_rank in self.rows for pair in per_rank)
        return all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))

    @property
    def overlaps(self) -> bool:
        """Whether two ranks have some indices in common and others not (a fused weight with shared keys and values)."""
        sets = [set(self.row_indices(rank)) for rank in range(len(self.rows))]
        return any(a & b and a != b for a, b in itertools.combinations(sets, 2))


@dataclass(frozen=True)
class Column(Split):
    """A linear split over its output features.

    Attributes:
        rows: For each rank the ranges of output rows that it computes. Disjoint and covering all rows: the weight is
            sharded. Equal for some ranks: every rank holds the whole weight, computes the rows that it needs, and the
            weight gradients are summed over the ranks (keys and values of multi-query attention).
        module: Name of the module in the model.
    """

    module: str


@dataclass(frozen=True)
class SplitParameter(Split):
    """A parameter that a region reads, of which each rank needs a part: a bias for each head, experts' weights.

    Attributes:
        rows: For each rank the ranges of indices along ``dim``, disjoint, or equal for some ranks (as columns).
        parameter: Name of the parameter in the model.
        dim: The dim that is split.
    """

    parameter: str
    dim: int


@dataclass(frozen=True)
class Entry(Split):
    """A linear that every rank computes whole, some of whose output features are used inside a region only.

    The gradients of these features are partial sums: they are all-reduced where they leave the region backwards.

    Attributes:
        rows: One set of ranges: the output features that the region uses.
        module: Name of the linear.
    """

    module: str


@dataclass(frozen=True)
class ArgumentSlice:
    """An argument of the region's module that every rank has whole and of which it needs a part.

    Attributes:
        argument: Position (``"0"``) or name of the argument.
        dim: The dim that is cut.
        period: The indices repeat with this period along the dim (heads within batch times heads).
        rows: For each rank the ranges of indices within one period.
    """

    argument: str
    dim: int
    period: int
    rows: tuple[Ranges, ...]


@dataclass(frozen=True)
class Boundary:
    """How a region looks whose communication stands at its module's edges, not at linears.

    The module's arguments are copied in and what it returns is summed: ``sum_r module_r(x) = module(x)``.

    Attributes:
        inputs: Arguments that carry gradients; each costs one all-reduce backward.
        outputs: Returned tensors; each costs one all-reduce forward.
        once: Parameters that count on the first rank only, since what they add is not split (a bias after the sum).
    """

    inputs: int
    outputs: int
    once: tuple[str, ...] = ()


@dataclass(frozen=True)
class Vocabulary:
    """Modules that share a table of words, which is split over its words.

    Attributes:
        embeddings: Names of the embeddings; each costs one all-reduce forward.
        heads: Names of the output heads; each costs one all-gather forward and one all-reduce backward.
    """

    embeddings: tuple[str, ...]
    heads: tuple[str, ...]

    @property
    def members(self) -> tuple[str, ...]:
        return self.embeddings + self.heads


@dataclass(frozen=True)
class AttributeChange:
    """An integer that the region's own code reads, and its value on one rank.

    Attributes:
        module: Module that holds the attribute.
        attribute: ``"num_heads"``, or ``"config.num_heads"`` for a field of a configuration object (which is copied).
        value: Value on each rank, in force while the region runs.
    """

    module: str
    attribute: str
    value: int


@dataclass(frozen=True)
class SizeRule:
    """How one call that names sizes (view, split, slice, ...) is changed because its tensor is split.

    Attributes:
        function: Name of the called function, for checking that the code still does what was proven.
        dim: Dim of the called tensor that is split.
        factor: Global size of that dim divided by its size on one rank; 1 where the tensor is not split.
        output_dim: Dim of the result whose requested size is divided by ``factor``.
    """

    function: str
    dim: int
    factor: int
    output_dim: int


@dataclass(frozen=True)
class Region:
    """Column-parallel linears, what is computed on their sharded outputs, and the row-parallel linears that consume it.

    One copy in for each distinct input of the columns, one reduce out for each row.

    Attributes:
        module: The module whose forward holds the region ("" is the root).
        columns: The column-parallel linears.
        rows: Names of the row-parallel linears; rank r holds the r-th chunk of their input features.
        inputs: The names of the columns, grouped by the input tensor that they share, in the order of their calls.
        partial: Parameters used inside the region that are not sharded: their gradients are summed over the ranks.
        attributes: Integers that are changed for one rank's share.
        sizes: For each call that names sizes, in order, its rule. Empty: the code runs as it is.
        shards: Parameters used inside the region of which each rank holds its part.
        entries: Linears outside of the region whose output enters it past its columns.
        arguments: Arguments of the module of which each rank takes its part.
        norms: Normalisations over features that are split: their statistics are summed over the ranks.
        boundary: For a region whose communication stands at its module's edges; it has no columns and rows.
        vocabulary: For a table of words, which is the first of its ``shards``; it has no columns and rows.
        random: Whether random numbers are drawn inside the region (dropout): they then differ between ranks.
        found_by: How the local code was found: "as is", "attributes", "sizes" or "adapter".
        error: Largest relative difference of the proof, over outputs and gradients.
    """

    module: str
    columns: tuple[Column, ...]
    rows: tuple[str, ...]
    inputs: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    attributes: tuple[AttributeChange, ...] = ()
    sizes: tuple[SizeRule, ...] = ()
    shards: tuple[SplitParameter, ...] = ()
    entries: tuple[Entry, ...] = ()
    arguments: tuple[ArgumentSlice, ...] = ()
    norms: tuple[str, ...] = ()
    boundary: Boundary | None = None
    vocabulary: Vocabulary | None = None
    random: bool = False
    found_by: str = "as is"
    error: float = 0.0

    @property
    def split_names(self) -> list[str]:
        """The columns, then the parameters that are split beside them."""
        return [column.module for column in self.columns] + [shard.parameter for shard in self.shards]


@dataclass(frozen=True)
class Replicated:
    """A linear, or a parameter that code multiplies by, that every rank holds whole, and why.

    Attributes:
        module: Name of the linear, or of the parameter.
        parameters: Number of its parameters.
        reason: Why it is not split.
        is_table: Whether it is an embedding, which code looks up in, and which is no linear.
    """

    module: str
    parameters: int
    reason: str
    is_table: bool = False


@dataclass(frozen=True)
class ShardingPlan:
    """How one model is split over ``tensor_parallel_size`` ranks.

    Attributes:
        tensor_parallel_size: Ranks that share the model.
        regions: The parts that are split, in the order in which the model runs them.
        replicated: The linears that are not split, with reasons.
        split_parameters: Parameters of the whole model that are split.
        matmul_parameters: Parameters of all linears, and all others that code multiplies by, split or not.
    """

    tensor_parallel_size: int
    regions: tuple[Region, ...] = ()
    replicated: tuple[Replicated, ...] = ()
    split_parameters: int = 0
    matmul_parameters: int = 0
    found_in_seconds: float = field(default=0.0, compare=False)

    @property
    def split_share(self) -> float:
        """Share of the parameters of linears that is split, 0 to 1."""
        if not self.matmul_parameters:
            return 0.0
        whole = sum(entry.parameters for entry in self.replicated if not entry.is_table)
        return 1.0 - whole / self.matmul_parameters

    @property
    def all_reduces_per_step(self) -> int:
        """All-reduces of one forward and backward, if every region runs once."""
        return sum(forward + backward for forward, backward in map(all_reduces, self.regions))

    def columns(self) -> Iterator[tuple[Region, Column]]:
        for region in self.regions:
            for column in region.columns:
                yield region, column

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, numbers and strings, as they stand in the YAML file."""
        return {"version": FORMAT_VERSION, **_plain(dataclasses.asdict(self))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShardingPlan:
        """The inverse of :meth:`to_dict`.

        Raises:
            PlanError: the data is not a plan of this version.
        """
        if not isinstance(data, Mapping) or data.get("version") != FORMAT_VERSION:
            found = data.get("version") if isinstance(data, Mapping) else type(data).__name__
            raise PlanError(
                f"This is no sharding plan of version {FORMAT_VERSION} (found: {found}). "
                "Write one with ShardingPlan.save."
            )
        try:
            return cls(
                tensor_parallel_size=int(data["tensor_parallel_size"]),
                regions=tuple(_region(entry) for entry in data["regions"]),
                replicated=tuple(Replicated(**entry) for entry in data["replicated"]),
                split_parameters=int(data["split_parameters"]),
                matmul_parameters=int(data["matmul_parameters"]),
                found_in_seconds=float(data.get("found_in_seconds", 0.0)),
            )
        except (KeyError, TypeError) as error:
            raise PlanError(f"The sharding plan is incomplete or has unknown fields: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as YAML; the file appears whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None))
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ShardingPlan:
        """Read a plan written by :meth:`save`.

        Raises:
            PlanError: no such file, or not a plan.
        """
        path = Path(path)
        if not path.is_file():
            raise PlanError(f"There is no plan file {path}. Write one with ShardingPlan.save(path).")
        try:
            data = yaml.safe_load(path.read_text())
        except yaml.YAMLError as error:
            raise PlanError(f"The plan file {path} is not YAML: {error}") from error
        return cls.from_dict(data)

    def describe(self) -> str:
        """The plan as a table: each region with what is split and how it was proven, then what stays whole and why."""
        lines = [
            f"Sharding plan for {self.tensor_parallel_size} ranks: {self.split_share:.1%} of the parameters of linears "
            f"are split, in {len(self.regions)} regions, {self.all_reduces_per_step} all-reduces per step"
        ]
        rows: list[tuple[str, ...]] = [("region", "column", "row", "local code", "proof error")]
        rows += [
            (
                region.module or "(root)",
                " ".join(_relative(name, region.module) for name in region.split_names),
                " ".join(_relative(row, region.module) for row in region.rows),
                _local_code(region),
                f"{region.error:.0e}",
            )
            for region in self.regions
        ]
        lines += _aligned(rows)
        if self.replicated:
            lines.append("Not split:")
            lines += _aligned(
                [(entry.module, f"{entry.parameters:,} parameters", entry.reason) for entry in self.replicated]
            )
        return "\n".join(lines)


def all_reduces(region: Region) -> tuple[int, int]:
    """How many all-reduces one run of ``region`` takes forward and backward, biases of shared columns not counted."""
    if region.boundary is not None:
        return region.boundary.outputs, region.boundary.inputs + len(region.partial)
    if region.vocabulary is not None:
        return len(region.vocabulary.embeddings), len(region.vocabulary.heads)
    shared = sum(not split.is_sharded for split in (*region.columns, *region.shards))
    backward = len(region.inputs) + len(region.partial) + shared + len(region.entries) + len(region.norms)
    return len(region.rows) + len(region.norms), backward


def ranges_of(indices: Sequence[int]) -> Ranges:
    """Ascending ``indices`` as half-open ranges."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return tuple(ranges)


def word_ranges(words: int, size: int) -> tuple[Ranges, ...] | None:
    """The words of each rank: chunks of ``ceil(words/size)``; None where a rank would have none."""
    share = -(-words // size)
    ranges = tuple(((rank * share, min((rank + 1) * share, words)),) for rank in range(size))
    return ranges if all(start < stop for ((start, stop),) in ranges) else None


def _region(data: Mapping[str, Any]) -> Region:
    fields = dict(data)
    for key, kind in (
        ("columns", Column),
        ("shards", SplitParameter),
        ("entries", Entry),
        ("arguments", ArgumentSlice),
    ):
        fields[key] = tuple(
            kind(**{**entry, "rows": tuple(tuple((int(a), int(b)) for a, b in ranges) for ranges in entry["rows"])})
            for entry in data[key]
        )
    fields["norms"] = tuple(data["norms"])
    boundary = data["boundary"]
    fields["boundary"] = boundary and Boundary(**{**boundary, "once": tuple(boundary["once"])})
    vocabulary = data["vocabulary"]
    fields["vocabulary"] = vocabulary and Vocabulary(tuple(vocabulary["embeddings"]), tuple(vocabulary["heads"]))
    fields["rows"] = tuple(data["rows"])
    fields["inputs"] = tuple(tuple(names) for names in data["inputs"])
    fields["partial"] = tuple(data["partial"])
    fields["attributes"] = tuple(AttributeChange(**entry) for entry in data["attributes"])
    fields["sizes"] = tuple(SizeRule(**entry) for entry in data["sizes"])
    return Region(**fields)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def _relative(name: str, parent: str) -> str:
    return name.removeprefix(f"{parent}.") if parent else name


def _local_code(region: Region) -> str:
    if region.attributes:
        return ", ".join(f"{change.attribute}={change.value}" for change in region.attributes)
    return "sizes rescaled" if region.sizes else region.found_by


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
