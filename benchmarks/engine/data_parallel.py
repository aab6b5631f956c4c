"""DistributedDataParallel: the whole model on every rank, part of the samples each."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.engine.peer import Peer


class DataParallel(Peer):
    name = "DDP"
    note = "every rank has the whole model and half of the samples"

    def build(self) -> nn.Module:
        self.tokens = self.tokens.chunk(dist.get_world_size())[dist.get_rank()]
        return DistributedDataParallel(self.setting.model(), gradient_as_bucket_view=True, forward_sync_buffers=False)

    def whole_loss(self, loss: Tensor) -> float:
        mean = loss.clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        return mean.item() / dist.get_world_size()

    def tensors_held(self) -> list[Tensor]:
        """With the buckets, of which the gradients are views and which outlive them."""
        return [*super().tensors_held(), *(p.grad for p in self.model.parameters() if p.grad is not None)]
