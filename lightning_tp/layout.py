"""How many ranks each mesh axis has, and the device mesh that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_tp.errors import ParallelConfigError

DATA_AXIS = "dp_shard"
TENSOR_AXIS = "tp"
AxisSize = int | Literal["auto"]


@dataclass(frozen=True)
class ParallelLayout:
    """The size of every mesh axis of a run.

    ``tp`` is the innermost axis: tensor-parallel peers have neighbouring ranks and so share a node.
    """

    data_parallel_size: int
    tensor_parallel_size: int

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size

    @classmethod
    def resolve(
        cls, tensor_parallel_size: AxisSize, data_parallel_size: AxisSize, devices: int, num_nodes: int
    ) -> ParallelLayout:
        """Fill in the sizes given as "auto".

        With both "auto", tensor parallelism spans the devices of one node and data parallelism the nodes. With one
        "auto", it takes the ranks that the other leaves.

        Args:
            tensor_parallel_size: Ranks that share one copy of the model, or "auto".
            data_parallel_size: Copies of the model, or "auto".
            devices: Devices (one rank each) per node.
            num_nodes: Nodes.

        Raises:
            ParallelConfigError: a size is no positive integer, or their product is not the number of ranks.
        """
        world_size = devices * num_nodes
        for name, size in (("tensor_parallel_size", tensor_parallel_size), ("data_parallel_size", data_parallel_size)):
            if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ParallelConfigError(f'{name} must be a positive integer or "auto", not {size!r}.')
        if tensor_parallel_size == "auto" and data_parallel_size == "auto":
            return cls(data_parallel_size=num_nodes, tensor_parallel_size=devices)
        for name, size in (("tensor_parallel_size", tensor_parallel_size), ("data_parallel_size", data_parallel_size)):
            if size != "auto" and world_size % size:
                legal = [n for n in range(1, world_size + 1) if world_size % n == 0]
                more = " There are more ranks asked for than devices." if size > world_size else ""
                raise ParallelConfigError(
                    f"{name}={size} does not divide the {world_size} ranks of this run "
                    f"({num_nodes} node(s) x {devices} device(s)).{more} Legal sizes: {legal}. "
                    f"Change {name}, or Trainer(devices=..., num_nodes=...)."
                )
        if tensor_parallel_size == "auto":
            tensor_parallel_size = world_size // int(data_parallel_size)
        if data_parallel_size == "auto":
            data_parallel_size = world_size // int(tensor_parallel_size)
        layout = cls(data_parallel_size=int(data_parallel_size), tensor_parallel_size=int(tensor_parallel_size))
        if layout.world_size != world_size:
            raise ParallelConfigError(
                f"data_parallel_size={layout.data_parallel_size} x tensor_parallel_size={layout.tensor_parallel_size} "
                f"needs {layout.world_size} ranks, but this run has {world_size} "
                f"({num_nodes} node(s) x {devices} device(s)). Set one of the sizes to "
                f'"auto", or ask for {layout.world_size} devices in all.'
            )
        return layout

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """The mesh ``[data_parallel_size, tensor_parallel_size]`` over all ranks, with axes ``dp_shard`` and ``tp``.

        Collective: every rank must call it after the default process group is initialised.
        """
        return init_device_mesh(
            device_type,
            (self.data_parallel_size, self.tensor_parallel_size),
            mesh_dim_names=(DATA_AXIS, TENSOR_AXIS),
        )
