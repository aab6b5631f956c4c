"""``LlamaForCausalLM`` of transformers: on one process, and split by its own plan."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engine.peer import Peer, fused_adamw, plain_and_distributed
from benchmarks.engine.setting import Setting


def llama(setting: Setting) -> nn.Module:
    """The model of ``setting`` with the classes of transformers and the same values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    whole = setting.model()
    config = LlamaConfig(
        vocab_size=setting.words,
        hidden_size=setting.hidden_size,
        intermediate_size=whole.blocks[0].feed_forward.gate_proj.out_features,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.heads,
        max_position_embeddings=setting.sequence,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(setting.dtype)
    model.load_state_dict({_name(name): value for name, value in whole.state_dict().items()})
    return model


_NAMES = {
    "embedding.": "model.embed_tokens.",
    "blocks.": "model.layers.",
    "attention_norm.": "input_layernorm.",
    "feed_forward_norm.": "post_attention_layernorm.",
    "attention.": "self_attn.",
    "feed_forward.": "mlp.",
    "head.": "lm_head.",
}


def _name(ours: str) -> str:
    """The name that transformers has for a parameter of the recipe."""
    if ours.startswith("norm."):
        return f"model.{ours}"
    for old, new in _NAMES.items():
        ours = ours.replace(old, new)
    return ours


def loss_of_transformers(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of a model of transformers; tokens as in :func:`next_token_loss`."""
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class TransformersOneProcess(Peer):
    name = "transformers, one process, 1 thread"
    note = "`LlamaForCausalLM` with the same values"
    alone = True
    float64 = False  # its norms and angles are float32
    whole = name

    def build(self) -> nn.Module:
        return llama(self.setting)

    def loss(self) -> Tensor:
        return loss_of_transformers(self.model, self.tokens)


class TransformersTensorParallel(TransformersOneProcess):
    name = 'transformers, `tp_plan="auto"`'
    note = "loaded from a folder on the machine"
    alone = False

    def build(self) -> nn.Module:
        from transformers import LlamaForCausalLM
        from transformers.distributed import DistributedConfig
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        with tempfile.TemporaryDirectory() as own:
            folders = [own]
            dist.broadcast_object_list(folders)
            if dist.get_rank() == 0:
                llama(self.setting).save_pretrained(folders[0])
            dist.barrier()
            config = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
            model = LlamaForCausalLM.from_pretrained(folders[0], distributed_config=config, dtype=self.setting.dtype)
            dist.barrier()
        return model.train()

    def build_optimizer(self) -> torch.optim.AdamW:
        return fused_adamw(plain_and_distributed(self.model))
