"""Sizes of the mesh axes: what "auto" becomes, and which sizes are refused."""

from __future__ import annotations

import pytest

from lightning_tp import ParallelConfigError, ParallelLayout
from lightning_tp.testing import RankPool


@pytest.mark.parametrize(
    ("tensor", "data", "devices", "nodes", "expected"),
    [
        ("auto", "auto", 8, 1, (1, 8)),
        ("auto", "auto", 8, 4, (4, 8)),
        (2, "auto", 8, 1, (4, 2)),
        ("auto", 2, 4, 1, (2, 2)),
        (4, 2, 8, 1, (2, 4)),
        (1, 1, 1, 1, (1, 1)),
    ],
)
def test_auto_takes_what_is_left(tensor: object, data: object, devices: int, nodes: int, expected: object) -> None:
    layout = ParallelLayout.resolve(tensor, data, devices, nodes)  # type: ignore[arg-type]
    assert (layout.data_parallel_size, layout.tensor_parallel_size) == expected
    assert layout.world_size == devices * nodes


@pytest.mark.parametrize(
    ("tensor", "data", "devices", "message"),
    [
        (3, "auto", 4, r"tensor_parallel_size=3 does not divide the 4 ranks.*Legal sizes: \[1, 2, 4\]"),
        (8, "auto", 4, "more ranks asked for than devices"),
        ("auto", 5, 4, "data_parallel_size=5 does not divide"),
        (2, 1, 4, "needs 2 ranks, but this run has 4"),
        (0, "auto", 4, "positive integer"),
        (2.0, "auto", 4, "positive integer"),
        (True, "auto", 4, "positive integer"),
        ("all", "auto", 4, "positive integer"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tensor: object, data: object, devices: int, message: str) -> None:
    with pytest.raises(ParallelConfigError, match=message):
        ParallelLayout.resolve(tensor, data, devices, 1)  # type: ignore[arg-type]


def coordinates() -> tuple[int, int]:
    mesh = ParallelLayout(2, 2).device_mesh("cpu")
    return mesh["dp_shard"].get_local_rank(), mesh["tp"].get_local_rank()


def test_tensor_parallel_peers_are_neighbours(ranks4: RankPool) -> None:
    assert ranks4.run(coordinates) == [(0, 0), (0, 1), (1, 0), (1, 1)]
