"""Tiny random checkpoints of each family as HF folders, and the transformers models they came from.

    folder = save_tiny("nemotron_h_moe", tmp_path)          # config.json, model.safetensors
    config, model = build_tiny("nemotron_h_moe")            # transformers, fp32, eval

Weights are random on a scale at which greedy decoding does not repeat itself; no vector is all zero
or all one, so that a swapped or skipped one shows.
"""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

VOCAB = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_NEMOTRON_H: dict[str, Any] = {
    **_COMMON,
    "head_dim": 16,
    "intermediate_size": 128,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
}
_MOE: dict[str, Any] = {
    **_NEMOTRON_H,
    "hybrid_override_pattern": "ME*EM",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
_BAMBA: dict[str, Any] = {
    **_COMMON,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "attn_layer_indices": [2],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}

# name -> (stem of the transformers classes, arguments of the config)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": ("NemotronH", {**_NEMOTRON_H, "hybrid_override_pattern": "M-M*-M"}),
    "nemotron_h_moe": ("NemotronH", _MOE),
    "nemotron_h_latent": ("NemotronH", {**_MOE, "moe_latent_size": 24}),
    "bamba": ("Bamba", _BAMBA),
}


def build_tiny(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> tuple[Any, Any]:
    """(config, model) of transformers. `overrides` replace arguments of the config."""
    stem, arguments = TINY[name]
    config = getattr(transformers, f"{stem}Config")(**{**arguments, **overrides})
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            leaf = key.rsplit(".", 1)[-1]
            if leaf in ("weight", "bias", "D", "e_score_correction_bias") and tensor.dim() == 1:
                tensor.add_(torch.empty(tensor.shape).normal_(0, 0.1, generator=generator))
            elif leaf == "dt_bias":  # steps from about 0.01 to 1
                tensor.copy_(torch.empty(tensor.shape).uniform_(-4, 0.5, generator=generator))
        for module in model.modules():
            # transformers clamps Nemotron-H's steps from below in prefill alone, with a value that
            # published configs give for initialisation; their explicit limit is (0, inf).
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = tuple(config.time_step_limit)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return config, model.to(dtype)


def save_tiny(
    name: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
    **overrides: Any,
) -> Path:
    """Write the checkpoint into `folder` and return it. A small `max_shard_size` makes shards."""
    _, model = build_tiny(name, seed=seed, dtype=dtype, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
