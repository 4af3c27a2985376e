"""Tiny random checkpoints: for each family, arguments of transformers' config that give every type
of layer, and what its oracle needs.

    model = CASES["llama"].build()           # transformers, fp32, eval
    CASES["llama"].save(model, folder)       # config.json, model.safetensors
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file, save_file

from tests.equivalence.families.minimax_loop import MiniMaxText01
from tests.equivalence.families.plamo2_loop import Plamo2

VOCAB = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "initializer_range": 0.2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_LINEAR, _FULL = "linear_attention", "full_attention"
_HEADS: dict[str, Any] = {**_COMMON, "num_attention_heads": 4, "num_key_value_heads": 2}


def _save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def _save_codestral(model: Any, folder: Path) -> None:
    """As Mistral published it: sizes alone, and the names of the library that trained it."""
    config = model.config
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "n_groups": config.n_groups,
        "tie_embeddings": False,
        "model_type": "mamba",
    }
    (folder / "params.json").write_text(json.dumps(params))
    tensors = {
        f"model.{name.replace('.embeddings.', '.embedding.')}": tensor
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "consolidated.safetensors")


def _none(model: Any) -> None:
    """Nothing to do, and nothing to give."""


@dataclass(frozen=True)
class Case:
    """One configuration of a family.

    config, model: names of transformers' classes. make: another maker of models, from arguments.
    ranks: sizes of tensor parallelism at which every unit divides or replicates.
    refused: (arguments, tp, pattern) of configurations that do not fit that many ranks.
    prepare: changes weights that would prove little. save: writes the checkpoint.
    new_cache: what transformers' model takes as the cache of a new sequence.
    """

    config: str
    model: str
    arguments: dict[str, Any]
    ranks: tuple[int, ...] = (2, 4)
    refused: tuple[tuple[dict[str, Any], int, str], ...] = ()
    prepare: Callable[[Any], None] = _none
    save: Callable[[Any, Path], None] = field(default=_save)
    new_cache: Callable[[Any], Any] = _none
    make: Callable[[dict[str, Any]], Any] | None = None

    def build(self, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
        """The model with random weights, the same each time; no vector is all zero or all one."""
        arguments = {**self.arguments, **overrides}
        if self.make is not None:
            return self.make(arguments)
        import transformers  # tests on a GPU read arguments alone, where it need not be

        config = getattr(transformers, self.config)(**arguments)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = getattr(transformers, self.model)(config).eval()
        _randomise(model)
        self.prepare(model)
        if model.generation_config is not None:
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
        return model.to(dtype)


_VECTORS = ("weight", "bias", "D", "e_score_correction_bias", "expert_bias")


def _randomise(model: Any) -> None:
    """A swapped or skipped vector must show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "dt_bias":  # steps from about 0.01 to 1
                tensor.copy_(torch.empty(tensor.shape).uniform_(-4, 0.5, generator=generator))
            elif tensor.dim() == 1 and leaf in _VECTORS:
                tensor.add_(torch.empty(tensor.shape).normal_(0, 0.1, generator=generator))


_MAMBA2_OF_HYBRIDS: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_MAMBA2: dict[str, Any] = {
    **_COMMON,
    "state_size": 16,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 2,
    "chunk_size": 16,
}
_GRANITE: dict[str, Any] = {
    **_HEADS,
    **_MAMBA2_OF_HYBRIDS,
    "intermediate_size": 32,
    "shared_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR],
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
}
_FALCON_H1: dict[str, Any] = {
    **_HEADS,
    **_MAMBA2_OF_HYBRIDS,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.1, 0.7, 1.4, 1.2],
}
_LLAMA = {**_HEADS, "intermediate_size": 128, "num_hidden_layers": 2}

_MAMBA: dict[str, Any] = {
    **_COMMON,
    "state_size": 8,
    "num_hidden_layers": 3,
    "time_step_rank": 4,
    # With a tied head such a model repeats its last token.
    "tie_word_embeddings": False,
}
_LFM2: dict[str, Any] = {
    **_HEADS,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", _FULL, "conv"],
}
_QWEN3_NEXT: dict[str, Any] = {
    **_HEADS,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR],
}
_QWEN_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_MROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}


def _save_olmo_hybrid(model: Any, folder: Path) -> None:
    """As published: transformers 5.24 saves the three convolutions of a layer as equal thirds,
    though values have more channels, and gives one norm the name of another."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors, config = load_file(file), model.config
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    for index, layer in enumerate(model.model.layers):
        name = f"model.layers.{index}."
        if config.layer_types[index] == _FULL:
            norm = tensors.pop(f"{name}feedforward_layer_norm.weight")
            tensors[f"{name}post_attention_layernorm.weight"] = norm
            continue
        weights = layer.linear_attn.conv1d.weight.detach().split([keys, keys, values])
        for part, weight in zip("qkv", weights, strict=True):
            tensors[f"{name}linear_attn.{part}_conv1d.weight"] = weight.contiguous()
    save_file(tensors, file)


def _save_stacked_experts(model: Any, folder: Path) -> None:
    """As in memory, where the experts of a layer are one tensor, below a model that also sees."""
    model.config.save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in model.state_dict().items()
    }
    tensors["model.visual.patch_embed.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")


def _prepare_recurrent_gemma(model: Any) -> None:
    """Tied embeddings times the root of the hidden size drown the layers: greedy ids repeat."""
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.3)
        for name, tensor in model.named_parameters():
            if name.endswith(("linear_out.weight", "o_proj.weight", "down_proj.weight")):
                tensor.mul_(16)


def _recurrent_gemma_cache(model: Any) -> Any:
    """Its state lies in the modules, where that of the sequence before may be left."""
    import transformers

    for module in model.modules():
        if hasattr(module, "conv1d_state"):
            module.conv1d_state = None
    return transformers.DynamicCache(config=model.config)


_LATENT: dict[str, Any] = {
    **_HEADS,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}


def _free_steps(model: Any) -> None:
    """transformers clamps steps from below in prefill alone, by a value for initialisation."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))


def _prepare_zamba(model: Any) -> None:
    """A tied head repeats tokens where embeddings drown the layers."""
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.1)
    _free_steps(model)


_ZAMBA: dict[str, Any] = {
    **_HEADS,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_key_value_heads": 4,
}
_ZAMBA2: dict[str, Any] = {
    **_ZAMBA,
    # Nothing norms what a block adds: larger weights let rounding grow from use to use.
    "initializer_range": 0.1,
    "num_hidden_layers": 7,
    "n_mamba_heads": 8,
    "mamba_d_state": 16,
    "mamba_ngroups": 2,
    "chunk_size": 16,
    "num_mem_blocks": 2,
    "adapter_rank": 8,
    "layers_block_type": ["hybrid", _LINEAR, "hybrid", "hybrid", _LINEAR, "hybrid", "hybrid"],
}


def _save_with_drafting(model: Any, folder: Path) -> None:
    """Published checkpoints carry layers that draft tokens."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), "mtp.layers.0.norm.weight": torch.ones(64)}, file)


_NEMOTRON_H: dict[str, Any] = {
    **_HEADS,
    "head_dim": 16,
    "intermediate_size": 128,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}

CASES: dict[str, Case] = {
    "plamo2": Case(
        "",
        "",
        {
            "model_type": "plamo2",
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size_per_head": 16,
            "attention_window_size": 9,
            "mamba_num_heads": 8,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_step": 2,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "dtype": "float32",
        },
        make=Plamo2,
    ),
    "nemotron_h": Case(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {**_NEMOTRON_H, "hybrid_override_pattern": "M-ME*-"},
        prepare=_free_steps,
    ),
    "nemotron_h_latent": Case(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {**_NEMOTRON_H, "hybrid_override_pattern": "ME*EM", "moe_latent_size": 24},
        prepare=_free_steps,
        save=_save_with_drafting,
        refused=(({"moe_intermediate_size": 30}, 4, r"layer 1 moe expert intermediate.* 30"),),
    ),
    "bamba": Case(
        "BambaConfig",
        "BambaForCausalLM",
        {
            **_HEADS,
            **_MAMBA2_OF_HYBRIDS,
            "mamba_n_groups": 2,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "attn_layer_indices": [2],
        },
    ),
    "zamba": Case(
        "ZambaConfig",
        "ZambaForCausalLM",
        {
            **_ZAMBA,
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "layers_block_type": [_LINEAR, _LINEAR, "hybrid", _LINEAR, "hybrid", "hybrid"],
        },
        prepare=_prepare_zamba,
    ),
    "zamba2": Case(
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {**_ZAMBA2, "use_mem_rope": True},
        prepare=_prepare_zamba,
    ),
    "zamba2_adapters": Case(
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {**_ZAMBA2, "use_shared_attention_adapter": True, "add_bias_linear": True},
        prepare=_prepare_zamba,
    ),
    "kimi_linear": Case(
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            **_LATENT,
            "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL],
            "linear_attn_config": {
                "head_dim": 16,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
        refused=(({}, 3, r"layer 0 kimi_delta heads has 4 units"),),
    ),
    "bailing_hybrid": Case(
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {
            **_LATENT,
            "q_lora_rank": 24,
            "head_dim": 16,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
            "layer_group_size": 2,
        },
    ),
    "minimax": Case(
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        {
            **_HEADS,
            "intermediate_size": 32,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 16,
            "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL],
            "full_attn_alpha_factor": 1.5,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 1.2,
            "linear_attn_beta_factor": 0.9,
            "mlp_alpha_factor": 1.1,
            "mlp_beta_factor": 0.7,
        },
    ),
    "minimax_text_01": Case(
        "",
        "",
        {
            "model_type": "minimax_text_01",
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rotary_dim": 8,
            "rope_theta": 10000.0,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attn_type_list": [0, 1, 0, 1],
            "layernorm_full_attention_alpha": 1.5,
            "layernorm_full_attention_beta": 0.8,
            "layernorm_linear_attention_alpha": 1.2,
            "layernorm_linear_attention_beta": 0.9,
            "layernorm_mlp_alpha": 1.1,
            "layernorm_mlp_beta": 0.7,
            "postnorm": True,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "dtype": "float32",
        },
        make=MiniMaxText01,
    ),
    "recurrent_gemma": Case(
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {
            **{name: _HEADS[name] for name in _HEADS if name != "initializer_range"},
            "num_key_value_heads": 1,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "attention_window_size": 16,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
        prepare=_prepare_recurrent_gemma,
        new_cache=_recurrent_gemma_cache,
    ),
    "qwen3_next": Case(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_QWEN3_NEXT, **_QWEN_EXPERTS, "mlp_only_layers": [1]},
        refused=(({"linear_num_value_heads": 6}, 4, r"layer 0 gated_delta value heads has 6"),),
    ),
    "qwen3_5_text": Case("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_QWEN3_NEXT, **_MROPE}),
    "qwen3_5_moe_text": Case(
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**_QWEN3_NEXT, **_QWEN_EXPERTS, **_MROPE},
    ),
    "qwen3_5_moe": Case(
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**_QWEN3_NEXT, **_QWEN_EXPERTS, **_MROPE},
        save=_save_stacked_experts,
    ),
    "olmo_hybrid": Case(
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {
            **_HEADS,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
            "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL],
        },
        save=_save_olmo_hybrid,
    ),
    "mamba": Case(
        "MambaConfig",
        "MambaForCausalLM",
        _MAMBA,
        refused=(({"hidden_size": 66}, 8, r"layer 0 mamba1 channels has 132 units.*tp=8"),),
    ),
    "falcon_mamba": Case("FalconMambaConfig", "FalconMambaForCausalLM", _MAMBA),
    "jamba": Case(
        "JambaConfig",
        "JambaForCausalLM",
        {
            **_HEADS,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "lfm2": Case("Lfm2Config", "Lfm2ForCausalLM", {**_LFM2, "block_multiple_of": 16}),
    "lfm2_moe": Case(
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {
            **_LFM2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "conv_bias": True,
        },
    ),
    "mamba2": Case(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        _MAMBA2,
        refused=(({"n_groups": 4, "hidden_size": 96, "num_heads": 12}, 6, r"groups has 4 units"),),
    ),
    "codestral_mamba": Case(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        # What the format does not say.
        {**_MAMBA2, "head_dim": 64, "num_heads": 2, "state_size": 128, "chunk_size": 256},
        ranks=(2,),
        save=_save_codestral,
    ),
    "granitemoehybrid": Case("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", {**_GRANITE}),
    "granitemoehybrid_dense": Case(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_GRANITE,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "tie_word_embeddings": True,
            "position_embedding_type": "rope",
        },
    ),
    "falcon_h1": Case(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        _FALCON_H1,
        ranks=(2,),
        refused=(({}, 4, r"layer 0 mamba2 heads has 6 units.*tp=4"),),
    ),
    "falcon_h1_biased": Case(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **_FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama": Case(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **_LLAMA,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        refused=(
            ({}, 8, r"layer 0 attention heads has 4 units.*tp=8"),
            ({"intermediate_size": 126}, 4, r"layer 0 mlp intermediate channels has 126 units"),
            (
                {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
                4,
                r"layer 0 attention kv heads has 3 units.*tp=4",
            ),
        ),
    ),
    "qwen3": Case(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {
            **_LLAMA,
            "head_dim": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}
