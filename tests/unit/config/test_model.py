"""Configurations with the keys and sizes of published ones, and how broken ones are refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tandem.config.model import (
    AttentionConfig,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    RotaryConfig,
    RotaryScaling,
)
from tandem.errors import ModelError
from tandem.models.registry import load_model_config
from tandem.state.spec import fingerprint

NEMOTRON_H_8B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "attention_bias": False,
    "attention_head_dim": 128,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "intermediate_size": 21504,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_in_fp32": False,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
NANO_9B_V2: dict[str, Any] = {
    **{key: value for key, value in NEMOTRON_H_8B.items() if key != "attention_head_dim"},
    "eos_token_id": 12,
    "head_dim": 128,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15680,
    "layer_norm_epsilon": 1e-05,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "max_position_embeddings": 131072,
    "mamba_ssm_cache_dtype": "float32",
    "time_step_limit": [0.0, math.inf],
}
NANO_3_30B: dict[str, Any] = {
    **NANO_9B_V2,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_num_heads": 64,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}
SUPER_3: dict[str, Any] = {
    **NANO_3_30B,
    "hidden_size": 4096,
    "hybrid_override_pattern": "MEMEMEM*EME",
    "mamba_num_heads": 128,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "mtp_hybrid_override_pattern": "*E",
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 5.0,
}
BAMBA_9B: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "attn_layer_indices": [9, 18, 27],
    "attn_rotary_emb": 64,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@pytest.fixture
def load(tmp_path: Path):
    def load(raw: dict[str, Any], **options: str) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return load_model_config(tmp_path, **options)

    return load


def kinds(model: ModelConfig) -> str:
    """One letter a layer, as in the pattern."""
    letters = {"mamba2": "M", "attention": "*", "mlp": "-", "moe": "E"}
    return "".join(
        letters[(layer.mixers[0] if layer.mixers else layer.feed_forward).kind]
        for layer in model.layers
    )


def only(model: ModelConfig, kind: type) -> Any:
    parts = {
        part
        for layer in model.layers
        for part in (*layer.mixers, layer.feed_forward)
        if isinstance(part, kind)
    }
    (found,) = parts
    return found


def test_nemotron_h_8b(load) -> None:
    model = load(NEMOTRON_H_8B)
    assert kinds(model) == NEMOTRON_H_8B["hybrid_override_pattern"]
    assert (model.vocab_size, model.hidden_size, model.dtype) == (131072, 4096, "bfloat16")
    assert (model.state_dtype, model.norm_eps, model.max_position) == ("float32", 1e-5, 8192)
    assert (model.bos_token_id, model.eos_token_ids, model.pad_token_id) == (1, (2,), 0)
    assert only(model, Mamba2Config) == Mamba2Config(
        num_heads=128,
        head_dim=64,
        num_groups=8,
        state_size=128,
        conv_kernel=4,
        has_conv_bias=True,
        has_proj_bias=False,
        dt_limit=(0.0, math.inf),  # time_step_min and max steer initialisation alone
        chunk_size=128,
        norm_eps=1e-5,
    )
    assert only(model, AttentionConfig) == AttentionConfig(32, 8, 128, 128**-0.5, False, None)
    assert only(model, MlpConfig) == MlpConfig(21504, "relu2", False)


def test_nano_9b_v2_has_heads_wider_than_its_hidden_size(load) -> None:
    model = load(NANO_9B_V2)
    assert len(model.layers) == 56
    attention = only(model, AttentionConfig)
    assert (attention.num_heads, attention.head_dim) == (40, 128)
    assert only(model, Mamba2Config).inner_size == 8192


def test_nemotron_3_nano(load) -> None:
    model = load(NANO_3_30B)
    assert [kinds(model).count(letter) for letter in "M*E"] == [23, 6, 23]
    assert only(model, AttentionConfig).rotary is None
    assert only(model, MoeConfig) == MoeConfig(
        num_experts=128,
        top_k=6,
        intermediate_size=1856,
        shared_intermediate_size=3712,
        latent_size=None,
        activation="relu2",
        num_groups=1,
        topk_groups=1,
        normalize_weights=True,
        scaling_factor=2.5,
        has_bias=False,
    )


def test_nemotron_3_super_has_latent_experts_and_drafting_layers_are_left_out(load) -> None:
    model = load(SUPER_3)
    moe = only(model, MoeConfig)
    assert (moe.latent_size, moe.num_experts, moe.top_k) == (1024, 512, 22)
    assert kinds(model) == SUPER_3["hybrid_override_pattern"]


def test_bamba_9b(load) -> None:
    model = load(BAMBA_9B)
    attention = [i for i, layer in enumerate(model.layers) if layer.mixers[0].kind == "attention"]
    assert attention == [9, 18, 27]
    assert only(model, AttentionConfig).rotary == RotaryConfig(64, 10000.0)
    mamba = only(model, Mamba2Config)
    assert (mamba.num_heads, mamba.head_dim, mamba.num_groups, mamba.state_size) == (
        128,
        64,
        1,
        128,
    )
    assert only(model, MlpConfig) == MlpConfig(14336, "silu_gated", False)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, RotaryScaling("linear", 4.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            RotaryScaling("llama3", 8.0, 8192, 1.0, 4.0),
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            RotaryScaling("yarn", 4.0, 32768, magnitude=0.1 * math.log(4) + 1),
        ),
        (
            {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
            RotaryScaling(
                "yarn",
                40.0,
                262144,
                magnitude=(0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1),
            ),
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "attention_factor": 1.5,
                "beta_fast": 16,
                "beta_slow": 2,
                "truncate": False,
            },
            RotaryScaling("yarn", 2.0, 262144, 2.0, 16.0, 1.5, False),
        ),
    ],
)
def test_rotary_positions_for_long_contexts(load, rope: dict[str, Any], expected) -> None:
    attention = only(load({**BAMBA_9B, "rope_scaling": rope}), AttentionConfig)
    assert attention.rotary == RotaryConfig(64, 10000.0, expected)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, RotaryConfig(64, 10000.0)),
        ({"attn_rotary_emb": None}, RotaryConfig(64, 10000.0)),
        ({"attn_rotary_emb": None, "head_dim": 64}, RotaryConfig(32, 10000.0)),
        (
            {
                "attn_rotary_emb": None,
                "rope_theta": None,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5e5,
                    "partial_rotary_factor": 1.0,
                },
            },
            RotaryConfig(128, 5e5),
        ),
    ],
)
def test_rotary_settings_of_bamba(load, change: dict[str, Any], expected: RotaryConfig) -> None:
    assert only(load({**BAMBA_9B, **change}), AttentionConfig).rotary == expected


def test_automatic_head_dim_of_bamba(load) -> None:
    assert only(load({**BAMBA_9B, "mamba_d_head": "auto"}), Mamba2Config).head_dim == 64


def test_names_of_layers_win_over_the_pattern(load) -> None:
    names = ["mamba", "linear_attention", "attention", "full_attention", "mlp", "moe"]
    model = load({**NANO_3_30B, "layers_block_type": names})
    assert kinds(model) == "MM**-E"


def test_projection_bias_of_nemotron_follows_use_bias(load) -> None:
    """`mamba_proj_bias` stands in published configs and reaches no projection."""
    small = {**NEMOTRON_H_8B, "hybrid_override_pattern": "M*-"}
    assert only(load({**small, "use_bias": True}), Mamba2Config).has_proj_bias
    assert not only(load({**small, "mamba_proj_bias": True}), Mamba2Config).has_proj_bias


def test_no_shared_expert(load) -> None:
    assert (
        only(load({**NANO_3_30B, "n_shared_experts": 0}), MoeConfig).shared_intermediate_size == 0
    )


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ([0.0, math.inf], (0.0, math.inf)),
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),
        ([0.001, 0.1], (0.001, 0.1)),
        (None, (0.0, math.inf)),
    ],
)
def test_explicit_step_limit_wins(load, limit: Any, expected: tuple[float, float]) -> None:
    assert only(load({**NANO_9B_V2, "time_step_limit": limit}), Mamba2Config).dt_limit == expected


def test_dtypes_may_be_overridden(load) -> None:
    model = load({**NANO_9B_V2, "mamba_ssm_cache_dtype": "float16"}, dtype="float32")
    assert (model.dtype, model.state_dtype) == ("float32", "float16")
    assert load(NANO_9B_V2, state_dtype="bfloat16").state_dtype == "bfloat16"
    assert load({**NANO_9B_V2, "torch_dtype": None, "dtype": "torch.float16"}).dtype == "float16"


def test_end_tokens_of_both_files_are_known(load, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 11, 12]}))
    assert load(NANO_9B_V2).eos_token_ids == (12, 2, 11)
    assert load({**NANO_9B_V2, "eos_token_id": [7, 12]}).eos_token_ids == (7, 12, 2, 11)
    (tmp_path / "generation_config.json").unlink()
    assert load({**NANO_9B_V2, "eos_token_id": None}).eos_token_ids == ()


def test_fingerprint_changes_with_what_state_means(load) -> None:
    base = fingerprint(load(NANO_9B_V2))
    assert fingerprint(load({**NANO_9B_V2, "eos_token_id": 3})) == base
    for change in ({"n_groups": 4}, {"mamba_ssm_cache_dtype": "bfloat16"}, {"hidden_size": 4608}):
        assert fingerprint(load({**NANO_9B_V2, **change})) != base, change


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (NANO_9B_V2, {"model_type": "gpt2"}, r"model_type='gpt2'.*nemotron_h.*bamba"),
        (NANO_9B_V2, {"model_type": None}, "model_type=None"),
        (NANO_9B_V2, {"hidden_size": None}, "key 'hidden_size' is missing"),
        (NANO_9B_V2, {"hidden_size": "big"}, "hidden_size='big'; expected an integer >= 1"),
        (NANO_9B_V2, {"hidden_size": True}, "hidden_size=True"),
        (NANO_9B_V2, {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern has 'X'"),
        (NANO_9B_V2, {"hybrid_override_pattern": ""}, "neither layers_block_type nor"),
        (NANO_9B_V2, {"layers_block_type": ["mamba", "gru"]}, "layers_block_type has gru"),
        (NANO_9B_V2, {"layers_block_type": 3}, "layers_block_type=3; expected a list"),
        (NANO_9B_V2, {"mlp_hidden_act": "gelu"}, "mlp_hidden_act='gelu' is not supported"),
        (NANO_9B_V2, {"mamba_hidden_act": "relu"}, "mamba_hidden_act='relu' is not supported"),
        (NANO_9B_V2, {"sliding_window": 512}, "sliding_window is not supported"),
        (NANO_9B_V2, {"time_step_limit": [1, 0]}, "time_step_limit=.*expected 0 <= low <= high"),
        (NANO_9B_V2, {"time_step_limit": "wide"}, "expected two numbers"),
        (NANO_9B_V2, {"n_groups": 5}, "128 Mamba heads are not a multiple of 5 groups"),
        (NANO_9B_V2, {"num_key_value_heads": 7}, "not a multiple of num_key_value_heads=7"),
        (NANO_9B_V2, {"torch_dtype": "float8"}, "dtype='float8' is not supported"),
        (NANO_9B_V2, {"mamba_ssm_cache_dtype": "int8"}, "state_dtype='int8' is not supported"),
        (NANO_9B_V2, {"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        (NANO_9B_V2, {"eos_token_id": "</s>"}, "eos_token_id='</s>'; expected a token id"),
        (NANO_3_30B, {"n_shared_experts": 2}, "n_shared_experts=2 is not supported"),
        (NANO_3_30B, {"moe_shared_expert_intermediate_size": None}, "is missing"),
        (NANO_3_30B, {"n_group": 3}, "128 experts in n_group=3"),
        (NANO_3_30B, {"num_experts_per_tok": 129}, "num_experts_per_tok=129 exceeds"),
        (BAMBA_9B, {"attn_layer_indices": [32]}, r"attn_layer_indices=\[32\]; expected.*0\.\.31"),
        (BAMBA_9B, {"attn_layer_indices": 3}, "attn_layer_indices=3; expected a list"),
        (BAMBA_9B, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        (BAMBA_9B, {"rope_scaling": {"type": "longrope"}}, "rope_type='longrope' is not supported"),
        (BAMBA_9B, {"attn_rotary_emb": 129}, "129 rotary dimensions of a 128 wide head"),
        (NANO_9B_V2, {"model_type": ["nemotron_h"]}, r"model_type=\['nemotron_h'\].*supported"),
        (NANO_9B_V2, {"model_type": "x", "architectures": 5}, r"architectures: 5\) is not"),
        (NANO_9B_V2, {"vocab_size": 10**400}, "vocab_size exceeds"),
        (NANO_9B_V2, {"mamba_num_heads": 1 << 40}, "mamba_num_heads exceeds"),
        (NANO_9B_V2, {"layer_norm_epsilon": 10**400}, "expected a positive number"),
        (NANO_9B_V2, {"layer_norm_epsilon": math.nan}, "=nan; expected a positive number"),
        (NANO_9B_V2, {"layer_norm_epsilon": -1e-5}, "=-1e-05; expected a positive number"),
        (NANO_9B_V2, {"time_step_limit": [0, 10**400]}, "expected two numbers"),
        (NANO_9B_V2, {"eos_token_id": -1}, "eos_token_id=-1; expected ids within vocab_size="),
        (NANO_9B_V2, {"eos_token_id": [2, 10**9]}, "expected ids within vocab_size=131072"),
        (BAMBA_9B, {"rope_scaling": "yarn"}, "='yarn'; expected a JSON object"),
        (BAMBA_9B, {"rope_scaling": {"rope_theta": "x"}}, "rope_theta='x'; expected a number"),
        (BAMBA_9B, {"rope_scaling": {"rope_theta": -1}}, "rope_theta=-1; expected a positive"),
        (BAMBA_9B, {"rope_scaling": {"partial_rotary_factor": math.nan}}, "partial_rotary_factor"),
        (BAMBA_9B, {"mamba_d_head": "wide"}, "mamba_d_head='wide'; expected an integer >= 1"),
        (BAMBA_9B, {"mamba_d_head": 0}, "mamba_d_head=0; expected an integer >= 1"),
        (BAMBA_9B, {"mamba_d_head": 32}, "mamba_d_head=32 are not mamba_expand . hidden_size"),
        (BAMBA_9B, {"attn_layer_indices": [True]}, r"attn_layer_indices=\[True\]; expected"),
        (BAMBA_9B, {"num_hidden_layers": 10**7}, "num_hidden_layers exceeds"),
    ],
)
def test_refusals_name_key_and_value(
    load, base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load({**base, **change})


@pytest.mark.parametrize("text", ["{", "[]", "\x80", "[" * 100_000])
def test_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist; expected a local HF"):
        load_model_config(tmp_path)
