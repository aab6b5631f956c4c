"""``parallelize_module`` of torch with a plan by hand.

The inputs of attention and feed-forward are prepared once, so that their linears share one all-reduce of the input's
gradient: four all-reduces a layer, as in Megatron-LM, where the usual plan (an input for each linear) has seven.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.engine.peer import Peer, fused_adamw, plain_and_distributed


class TorchParallelize(Peer):
    name = "torch `parallelize_module`"
    note = "by hand: linears that read one tensor share one prepared input; head counts divided"

    def build(self) -> nn.Module:
        model = self.setting.model()
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        whole = Replicate()
        plan: dict[str, ParallelStyle] = {
            "attention": PrepareModuleInput(
                input_layouts=(whole, None, None), desired_input_layouts=(whole, None, None)
            ),
            "feed_forward": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        }
        for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj"):
            plan[name] = ColwiseParallel()
        plan["attention.o_proj"] = RowwiseParallel()
        plan["feed_forward.gate_proj"] = plan["feed_forward.up_proj"] = ColwiseParallel()
        plan["feed_forward.down_proj"] = RowwiseParallel()
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
            attention: Any = block.attention
            attention.num_heads //= ranks
            attention.num_kv_heads //= ranks
        return model

    def build_optimizer(self) -> Any:
        return fused_adamw(plain_and_distributed(self.model))
