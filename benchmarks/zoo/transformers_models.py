"""Small configurations of the architectures in transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.architecture import (
    SAMPLES,
    VOCABULARY,
    Architecture,
    causal_batch,
    encoder_batch,
    image_and_text_batch,
    image_batch,
    sound_batch,
    tokens,
    unsettled,
)

_NO_DROPOUT = (
    "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop",
    "embd_pdrop", "attn_pdrop", "dropout", "activation_dropout", "classifier_dropout", "embd_dropout", "ffn_dropout",
    "residual_dropout", "resid_dropout", "embed_dropout", "embedding_dropout", "attention_dropout_prob",
    "dropout_rate", "layerdrop", "encoder_layerdrop", "decoder_layerdrop", "drop_path_rate", "feat_proj_dropout",
    "final_dropout", "feat_quantizer_dropout", "seq_classif_dropout", "qa_dropout", "projector_dropout",
    "attn_dropout_prob", "emb_pdrop", "summary_first_dropout",
)  # fmt: skip
_DECODER = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_WINDOW = 8  # shorter than the sequence, so that it matters
_GPT = dict(
    vocab_size=VOCABULARY,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_positions=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_EXPERTS = {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_VISION = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8
)
_TEXT_TOWER = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_SOUND = dict(
    vocab_size=32, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    conv_dim=(32, 32), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2, apply_spec_augment=False, mask_time_prob=0.0, mask_feature_prob=0.0,
)  # fmt: skip


def build(model: str, config: str, options: dict[str, Any], grouped_matmul: bool = False) -> nn.Module:
    """A model of transformers from the names of its classes, with every dropout off, and noise on its parameters.

    Experts run one after the other, or by ``grouped_matmul``, which has no float64.
    """
    import transformers

    made = getattr(transformers, config)(**options)
    for part in (made, *(value for value in vars(made).values() if isinstance(value, transformers.PretrainedConfig))):
        for name in _NO_DROPOUT:
            if isinstance(getattr(part, name, None), (int, float)):
                setattr(part, name, type(getattr(part, name))(0))
    if not grouped_matmul:
        made._experts_implementation = "eager"
    return unsettled(getattr(transformers, model), made)


def _causal(
    name: str, prefix: str, options: dict[str, Any], note: str = "", mechanism: str = "pairs", fast: bool = False
) -> Architecture:
    built = partial(build, f"{prefix}ForCausalLM", f"{prefix}Config", options)
    return Architecture(name, built, causal_batch, note, mechanism, fast)


def _masked(
    name: str, prefix: str, options: dict[str, Any], note: str = "", mechanism: str = "pairs", fast: bool = False
) -> Architecture:
    built = partial(build, f"{prefix}ForMaskedLM", f"{prefix}Config", options)
    return Architecture(name, built, encoder_batch, note, mechanism, fast)


def _image(
    name: str, prefix: str, options: dict[str, Any], note: str = "", mechanism: str = "pairs", fast: bool = False
) -> Architecture:
    built = partial(build, f"{prefix}ForImageClassification", f"{prefix}Config", options)
    return Architecture(name, built, image_batch, note, mechanism, fast)


def whisper_batch() -> dict[str, Any]:
    features = torch.randn(SAMPLES, 16, 32, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "labels": tokens()}


_LATENT = {
    **_DECODER, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "qk_nope_head_dim": 16, "first_k_dense_replace": 1,
}  # fmt: skip
_T5 = dict(
    vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0,
    pad_token_id=0, eos_token_id=1,
)  # fmt: skip
_BART = dict(
    vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
)  # fmt: skip
_WHISPER = {
    **{key: value for key, value in _BART.items() if key not in ("max_position_embeddings", "forced_eos_token_id")},
    "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32, "begin_suppress_tokens": None,
    "suppress_tokens": None,
}  # fmt: skip
_DEBERTA = {
    **_DECODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8, "type_vocab_size": 0
}  # fmt: skip
_FALCON = {key: value for key, value in _DECODER.items() if key not in ("intermediate_size", "max_position_embeddings")}

DECODERS = (
    _causal("llama", "Llama", _GROUPED, "grouped queries", fast=True),
    _causal("mistral", "Mistral", {**_GROUPED, "sliding_window": _WINDOW}, "grouped queries, sliding window"),
    _causal("qwen2", "Qwen2", _GROUPED, "biases on q, k, v"),
    _causal("qwen3", "Qwen3", {**_GROUPED, "head_dim": 16},
            "q and k norms over a head", mechanism="norms over a head", fast=True),
    _causal("qwen2_moe", "Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
            "experts in one tensor, and a shared one", mechanism="experts"),
    _causal("qwen3_moe", "Qwen3Moe", {**_EXPERTS, "head_dim": 16, "decoder_sparse_step": 1},
            "experts in one tensor", mechanism="experts"),
    _causal("mixtral", "Mixtral", {**_GROUPED, "num_local_experts": 4},
            "experts in one tensor", mechanism="experts", fast=True),
    Architecture(
        "mixtral, grouped matmul",
        partial(build, "MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}, True),
        causal_batch,
        "experts in one product",
        "experts",
        precision="32-true",
    ),
    _causal("gemma", "Gemma", {**_GROUPED, "head_dim": 16}, "norms with an offset, tied head"),
    _causal("gemma multi-query", "Gemma", {**_GROUPED, "num_key_value_heads": 1, "head_dim": 16},
            "one key head", mechanism="shared keys", fast=True),
    _causal("gemma2", "Gemma2", {**_GROUPED, "head_dim": 16, "sliding_window": _WINDOW},
            "soft-capped scores, local and global layers"),
    Architecture("gemma3", partial(build, "Gemma3ForCausalLM", "Gemma3TextConfig", {**_GROUPED, "head_dim": 16,
                 "sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
                 causal_batch, "q and k norms, local and global layers", mechanism="norms over a head"),
    _causal("phi", "Phi", _DECODER, "attention and MLP in parallel"),
    _causal("phi3", "Phi3", _GROUPED,
            "fused qkv and gate_up of unequal sections", mechanism="fused linears", fast=True),
    Architecture("gpt2", partial(build, "GPT2LMHeadModel", "GPT2Config", _GPT), causal_batch,
            "Conv1D", mechanism="Conv1D", fast=True),
    Architecture("gpt_neo", partial(build, "GPTNeoForCausalLM", "GPTNeoConfig", dict(
        vocab_size=VOCABULARY, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=8, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)), causal_batch, "local attention"),
    _causal("gpt_neox", "GPTNeoX", _DECODER, "heads first in fused qkv, parallel blocks", mechanism="fused linears"),
    _causal("gptj", "GPTJ", {**_GPT, "rotary_dim": 8}, "parallel blocks"),
    _causal("codegen", "CodeGen", {**_GPT, "rotary_dim": 8},
            "fused qkv in four blocks of its own", mechanism="fused linears"),
    _causal("gpt_bigcode", "GPTBigCode", _GPT, "multi-query, fused", mechanism="fused shared keys"),
    _causal("opt", "OPT", dict(vocab_size=VOCABULARY, hidden_size=64, ffn_dim=128, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=64, pad_token_id=1, bos_token_id=2,
            eos_token_id=2), "learned positions"),
    _causal("bloom", "Bloom", dict(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4, pad_token_id=3,
            bos_token_id=1, eos_token_id=2), "alibi folded into the batch", mechanism="alibi", fast=True),
    _causal("mpt", "Mpt", dict(vocab_size=VOCABULARY, d_model=64, n_layers=2, n_heads=4, max_seq_len=64,
            pad_token_id=0, bos_token_id=1, eos_token_id=2), "alibi", mechanism="alibi"),
    _causal("falcon multi-head", "Falcon", {**_FALCON, "alibi": True, "multi_query": False,
            "new_decoder_architecture": False}, "linears of its own, alibi", mechanism="alibi"),
    _causal("falcon multi-query", "Falcon", {**_FALCON, "multi_query": True},
            "fused qkv with one key head", mechanism="fused shared keys", fast=True),
    _causal("falcon new decoder", "Falcon", {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True},
            "fused groups of q, k, v", mechanism="fused linears"),
    _causal("stablelm", "StableLm", {**_DECODER, "num_key_value_heads": 4}, "partial rotary"),
    _causal("stablelm q/k norm", "StableLm", {**_GROUPED, "qk_layernorm": True},
            "a norm module for each head", mechanism="norms over a head"),
    _causal("starcoder2", "Starcoder2", _GROUPED, "biases"),
    _causal("olmo", "Olmo", _GROUPED, "norms without weights"),
    _causal("olmo2", "Olmo2", _GROUPED, "q and k norms over all heads", mechanism="norms over all heads", fast=True),
    _causal("cohere", "Cohere", _GROUPED, "parallel blocks"),
    _causal("cohere q/k norm", "Cohere", {**_GROUPED, "use_qk_norm": True},
            "norm weights for each head", mechanism="parameters of heads"),
    _causal("granite", "Granite", _GROUPED, "scaled residuals"),
    _causal("deepseek_v3", "DeepseekV3", _LATENT, "latent attention, experts", mechanism="latent attention", fast=True),
    _causal("gpt_oss", "GptOss", {**_GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": _WINDOW},
            "attention sinks, experts with biases", mechanism="experts with biases", fast=True),
    _causal("mamba", "Mamba", dict(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=8,
            pad_token_id=0, bos_token_id=1, eos_token_id=2),
            "state space, no attention", mechanism="weights used by hand", fast=True),
)  # fmt: skip

ENCODERS = (
    _masked("bert", "Bert", _DECODER, "post-norm"),
    _masked("roberta", "Roberta", {**_DECODER, "pad_token_id": 1, "max_position_embeddings": 66}, "post-norm"),
    _masked("distilbert", "DistilBert", dict(vocab_size=VOCABULARY, dim=64, n_layers=2, n_heads=4, hidden_dim=128,
            max_position_embeddings=64, pad_token_id=0), "post-norm"),
    _masked("albert", "Albert", {**_DECODER, "embedding_size": 32},
            "one layer called several times", mechanism="repeated calls", fast=True),
    _masked("electra", "Electra", {**_DECODER, "embedding_size": 32}, "narrow embeddings"),
    _masked("deberta_v2", "DebertaV2", {**_DEBERTA, "share_att_key": True},
            "linears called on positions too", mechanism="positions through linears", fast=True),
    _masked("deberta_v2 own keys", "DebertaV2", {**_DEBERTA, "share_att_key": False},
            "position keys", mechanism="positions through linears"),
    Architecture("t5", partial(build, "T5ForConditionalGeneration", "T5Config", _T5), encoder_batch,
                 "bias of the first layer handed to all", mechanism="bias for all layers", fast=True),
    Architecture("t5 gated", partial(build, "T5ForConditionalGeneration", "T5Config",
                 {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}), encoder_batch,
            "gated, untied head", mechanism="bias for all layers"),
    Architecture("bart", partial(build, "BartForConditionalGeneration", "BartConfig", _BART), encoder_batch,
                 "cross-attention"),
    Architecture("whisper", partial(build, "WhisperForConditionalGeneration", "WhisperConfig", _WHISPER), whisper_batch,
                 "sound to text, cross-attention"),
)  # fmt: skip

VISION_AND_SOUND = (
    _image("vit", "ViT", _VISION, "class token"),
    _image("deit", "DeiT", _VISION, "class and distillation tokens"),
    _image("beit", "Beit", {**_VISION, "vocab_size": VOCABULARY, "use_relative_position_bias": True},
           "a bias table in each layer", mechanism="bias tables"),
    _image("swin", "Swin", dict(image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[4, 8],
           window_size=4), "windows with a bias table", mechanism="bias tables", fast=True),
    Architecture("clip", partial(build, "CLIPModel", "CLIPConfig", dict(
        text_config=_TEXT_TOWER, vision_config=_VISION, projection_dim=32)), image_and_text_batch, "two towers"),
    Architecture("siglip", partial(build, "SiglipModel", "SiglipConfig", dict(
        text_config=_TEXT_TOWER, vision_config=_VISION)), image_and_text_batch,
        "two towers, attention of torch in the pooling head", mechanism="attention of torch"),
    Architecture("wav2vec2", partial(build, "Wav2Vec2Model", "Wav2Vec2Config", _SOUND), sound_batch,
                 "convolutions before the encoder"),
    Architecture("hubert", partial(build, "HubertModel", "HubertConfig", _SOUND), sound_batch,
                 "convolutions before the encoder"),
)  # fmt: skip
