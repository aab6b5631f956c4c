"""AutoTP of DeepSpeed, where that is installed. It builds an operator for its all-reduces when it starts."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.engine.peer import Unavailable, fused_adamw
from benchmarks.engine.transformers_llama import TransformersOneProcess, llama


class DeepSpeedAutoTP(TransformersOneProcess):
    name = "DeepSpeed AutoTP"
    note = "of the same `LlamaForCausalLM`"
    alone = False
    required = False

    def build(self) -> nn.Module:
        if importlib.util.find_spec("deepspeed") is None:
            raise Unavailable("not installed: no module named 'deepspeed'")
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        config = {
            "train_batch_size": self.setting.batch,
            "train_micro_batch_size_per_gpu": self.setting.batch,
            "tensor_parallel": {"autotp_size": dist.get_world_size()},
            "zero_optimization": {"stage": 0},
            "zero_allow_untested_optimizer": True,
        }
        self.engine, *_ = deepspeed.initialize(model=llama(self.setting), optimizer=fused_adamw, config=config)
        return self.engine

    def build_optimizer(self) -> Any:
        return self.engine.optimizer

    def step(self) -> Tensor:
        self.release_gradients()
        loss = self.loss()
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def is_split(self, parameter: Tensor) -> bool:
        names = {id(p): name for name, p in self.model.named_parameters()}
        return names[id(parameter)].endswith(("_proj.weight", "lm_head.weight"))
