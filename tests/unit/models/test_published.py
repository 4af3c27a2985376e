"""Configurations with the keys and sizes of published models: as many parameters as their makers
say, as many that one token uses; and how broken ones are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.bench.limits import count_work
from tandem.config.model import SharedBlockConfig
from tandem.errors import ModelError
from tandem.models.registry import load_model_config

_M, _A, _H = "mamba", "attention", "hybrid"

GRANITE_H_SMALL: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 768,
    "layer_types": [_A if index in (5, 15, 25, 35) else _M for index in range(40)],
    "logits_scaling": 16,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000,
    "shared_intermediate_size": 1536,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}
FALCON_H1_7B: dict[str, Any] = {
    "model_type": "falcon_h1",
    "attention_bias": False,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.3,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "key_multiplier": 0.19,
    "lm_head_multiplier": 0.013,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 128,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "max_position_embeddings": 262144,
    "mlp_multipliers": [0.88, 0.22],
    "num_attention_heads": 12,
    "num_hidden_layers": 44,
    "num_key_value_heads": 2,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.35],
    "ssm_out_multiplier": 0.24,
    "tie_word_embeddings": False,
    "vocab_size": 130048,
}
JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 65536,
}
QWEN3_NEXT_80B: dict[str, Any] = {
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
KIMI_LINEAR_48B: dict[str, Any] = {
    "model_type": "kimi_linear",
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [index for index in range(1, 27) if index % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
MINIMAX_TEXT_01: dict[str, Any] = {
    "model_type": "minimax_text_01",
    "attn_type_list": [1 if index % 8 == 7 else 0 for index in range(80)],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "layernorm_full_attention_alpha": 3.5565588200778455,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 3.5565588200778455,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 3.5565588200778455,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 10240000,
    "num_attention_heads": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "postnorm": True,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000,
    "rotary_dim": 64,
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 200064,
}
FALCON_MAMBA_7B: dict[str, Any] = {
    "model_type": "falcon_mamba",
    "conv_kernel": 4,
    "expand": 16,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "layer_norm_epsilon": 1e-05,
    "mixer_rms_eps": 1e-06,
    "num_hidden_layers": 64,
    "residual_in_fp32": True,
    "state_size": 16,
    "tie_word_embeddings": False,
    "time_step_rank": 256,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 65024,
}
ZAMBA2_7B: dict[str, Any] = {
    "model_type": "zamba2",
    "adapter_rank": 128,
    "add_bias_linear": False,
    "attention_head_dim": 224,
    "attention_hidden_size": 7168,
    "chunk_size": 256,
    "hidden_act": "gelu",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "layers_block_type": [
        _H if index in (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77) else _M
        for index in range(81)
    ],
    "mamba_d_conv": 4,
    "mamba_d_state": 64,
    "mamba_expand": 2,
    "mamba_headdim": 64,
    "mamba_ngroups": 2,
    "max_position_embeddings": 4096,
    "n_mamba_heads": 112,
    "num_attention_heads": 32,
    "num_hidden_layers": 81,
    "num_key_value_heads": 32,
    "num_mem_blocks": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "time_step_limit": None,
    "use_conv_bias": True,
    "use_long_context": False,
    "use_mem_rope": True,
    "use_shared_attention_adapter": False,
    "vocab_size": 32000,
}
RECURRENT_GEMMA_2B: dict[str, Any] = {
    "model_type": "recurrent_gemma",
    "attention_bias": False,
    "attention_window_size": 2048,
    "block_types": ["recurrent", "recurrent", "attention"],
    "conv1d_width": 4,
    "embeddings_scale_by_sqrt_dim": True,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2560,
    "intermediate_size": 15360,
    "logits_soft_cap": 30.0,
    "lru_width": 2560,
    "num_attention_heads": 10,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}
LFM2_1B: dict[str, Any] = {
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_use_swiglu": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "tie_embedding": True,
    "vocab_size": 65536,
}
PLAMO_2_1B: dict[str, Any] = {
    "model_type": "plamo2",
    "attention_window_size": 2048,
    "hidden_size": 2048,
    "hidden_size_per_head": 128,
    "intermediate_size": 8192,
    "mamba_chunk_size": 256,
    "mamba_d_conv": 4,
    "mamba_d_state": 64,
    "mamba_enabled": True,
    "mamba_num_heads": 32,
    "mamba_step": 2,
    "max_position_embeddings": 10485760,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "sliding_window": 2048,
    "use_predefined_initial_state": False,
    "vocab_size": 100000,
}
MAMBA2_130M: dict[str, Any] = {
    "model_type": "mamba2",
    "chunk_size": 256,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 768,
    "layer_norm_epsilon": 1e-05,
    "n_groups": 1,
    "norm_before_gate": True,
    "num_heads": 24,
    "num_hidden_layers": 24,
    "residual_in_fp32": True,
    "rms_norm": True,
    "state_size": 128,
    "tie_word_embeddings": True,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 50288,
}
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("raw", "held", "used"),
    [
        (GRANITE_H_SMALL, 32.2, 9.0),
        (FALCON_H1_7B, 7.6, 7.6),
        (JAMBA, 51.6, 12.1),
        (QWEN3_NEXT_80B, 79.7, 3.9),
        (KIMI_LINEAR_48B, 49.1, 3.5),
        (MINIMAX_TEXT_01, 456.0, 45.9),
        (FALCON_MAMBA_7B, 7.27, 7.27),
        (RECURRENT_GEMMA_2B, 2.68, 2.68),
        (LFM2_1B, 1.17, 1.17),
        (PLAMO_2_1B, 1.29, 1.29),
        (MAMBA2_130M, 0.13, 0.13),
        (LLAMA_3_8B, 8.03, 8.03),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_sizes_are_those_of_the_published_model(
    raw: dict[str, Any], held: float, used: float, tmp_path: Path
) -> None:
    """Billions of parameters: matrices, and the embedding where the head is another."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = load_model_config(tmp_path)
    work = count_work(model)
    embedding = 0 if model.tie_embeddings else work.num_head_weights
    assert (work.num_weights + embedding) / 1e9 == pytest.approx(held, rel=0.03)
    assert (work.num_used_weights + embedding) / 1e9 == pytest.approx(used, rel=0.1)


def test_zamba2_uses_two_blocks_by_turns(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ZAMBA2_7B))
    uses = [
        mixer
        for layer in load_model_config(tmp_path).layers
        for mixer in layer.mixers
        if isinstance(mixer, SharedBlockConfig)
    ]
    assert [use.block for use in uses] == [0, 1] * 6 + [0]
    assert [use.owns_weights for use in uses] == [True, True] + [False] * 11
    assert (uses[0].attention.head_dim, uses[0].attention.scale) == (224, 112**-0.5)
    assert (uses[0].attention_rank, uses[0].mlp_rank) == (None, 128)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (GRANITE_H_SMALL, {"layer_types": ["mamba", "conv"]}, "layer_types has conv; supported"),
        (GRANITE_H_SMALL, {"position_embedding_type": "alibi"}, "'alibi' is not supported"),
        (GRANITE_H_SMALL, {"num_experts_per_tok": 73}, "=73 exceeds the 72 experts"),
        (GRANITE_H_SMALL, {"residual_multiplier": 0}, "residual_multiplier=0; expected a positive"),
        (FALCON_H1_7B, {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers=.*a list of 5 numbers"),
        (FALCON_H1_7B, {"mamba_d_ssm": 3000}, "are not inner size = 3000 wide"),
        (JAMBA, {"attn_layer_offset": 8}, "attn_layer_offset=8 is not below attn_layer_period=8"),
        (JAMBA, {"sliding_window": 4096}, "sliding_window is not supported for jamba"),
        (QWEN3_NEXT_80B, {"linear_num_value_heads": 24}, "=24 is not a multiple of linear_num_key"),
        (QWEN3_NEXT_80B, {"mlp_only_layers": [48]}, "a list of numbers in 0..47"),
        (QWEN3_NEXT_80B, {"rope_scaling": {"type": "dynamic"}}, "rope_type='dynamic' is not"),
        (KIMI_LINEAR_48B, {"mla_use_nope": False}, "mla_use_nope=false is not supported"),
        (
            KIMI_LINEAR_48B,
            {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}},
            "must name each layer from 1 to 27 once",
        ),
        (KIMI_LINEAR_48B, {"num_expert_group": 3}, "256 experts in n_group=3"),
        (KIMI_LINEAR_48B, {"layer_types": ["linear_attention"]}, "layer_types names 1 layers"),
        (KIMI_LINEAR_48B, {"mlp_layer_types": ["dense"] * 28}, "mlp_layer_types names 28 layers"),
        (LFM2_1B, {"layer_types": ["conv"] * 17}, "layer_types names 17 layers; expected 16"),
        (MINIMAX_TEXT_01, {"postnorm": False}, "postnorm=false is not supported; expected true"),
        (MINIMAX_TEXT_01, {"shared_intermediate_size": 8}, "shared_intermediate_size exceeds 0"),
        (MINIMAX_TEXT_01, {"attn_type_list": [0, 2]}, "attn_type_list has 2; supported: 0, 1"),
        (ZAMBA2_7B, {"use_long_context": True}, "use_long_context=true is not supported"),
        (ZAMBA2_7B, {"attention_head_dim": 112}, "must be 7168 and 224"),
        (ZAMBA2_7B, {"n_mamba_heads": 100}, "n_mamba_heads=100 does not divide"),
        (RECURRENT_GEMMA_2B, {"lru_width": 2561}, "lru_width=2561 is not a multiple"),
        (RECURRENT_GEMMA_2B, {"hidden_activation": "relu"}, "hidden_activation='relu' is not"),
        (LFM2_1B, {"full_attn_idxs": [16]}, "a list of numbers in 0..15"),
        (PLAMO_2_1B, {"use_predefined_initial_state": True}, "use_predefined_initial_state=true"),
        (GRANITE_H_SMALL, {"num_hidden_layers": 41}, "layer_types names 40 layers; expected 41"),
        (GRANITE_H_SMALL, {"normalization_function": "layernorm"}, "='layernorm' is not supported"),
        (QWEN3_NEXT_80B, {"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        (QWEN3_NEXT_80B, {"attn_output_gate": False}, "attn_output_gate=false is not supported"),
        (MINIMAX_TEXT_01, {"attn_type_list": [0, 1]}, "attn_type_list names 2 layers; expected 80"),
        (
            {**MINIMAX_TEXT_01, "attn_type_list": None},
            {"layer_types": ["full_attention"]},
            "layer_types names 1 layers; expected 80",
        ),
        (MINIMAX_TEXT_01, {"use_qk_norm": True}, "use_qk_norm=true is not supported"),
        (ZAMBA2_7B, {"num_hidden_layers": 80}, "layers_block_type names 81 layers; expected 80"),
        (ZAMBA2_7B, {"mamba_headdim": 128}, "mamba_headdim=128; expected 64"),
        (
            KIMI_LINEAR_48B,
            {"num_expert_group": 4, "use_grouped_topk": False},
            "use_grouped_topk=false is not supported",
        ),
        (RECURRENT_GEMMA_2B, {"embeddings_scale_by_sqrt_dim": False}, "sqrt_dim=false is not"),
        (MAMBA2_130M, {"rms_norm": False}, "rms_norm=false is not supported; expected true"),
        (LLAMA_3_8B, {"sliding_window": 4096}, "sliding_window is not supported for llama"),
    ],
)
def test_refusals_name_key_and_value(
    base: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**base, **change}))
    with pytest.raises(ModelError, match=message) as caught:
        load_model_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dim": 4096, "n_layers": 64}, "model_type=None; of models with a params.json only"),
        ({"model_type": "mamba", "n_layers": 64, "vocab_size": 32768}, "key 'dim' is missing"),
    ],
)
def test_a_params_json_of_another_model_is_refused(
    params: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "params.json").write_text(json.dumps(params))
    with pytest.raises(ModelError, match=message):
        load_model_config(tmp_path)
