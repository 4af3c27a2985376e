"""Tiny random checkpoints: for each family, arguments of transformers' config that give every type
of layer, and what its oracle needs.

    model = CASES["llama"].build()           # transformers, fp32, eval
    CASES["llama"].save(model, folder)       # config.json, model.safetensors
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

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
_HEADS: dict[str, Any] = {**_COMMON, "num_attention_heads": 4, "num_key_value_heads": 2}


def _save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def _keep(model: Any) -> None:
    """Nothing to change."""


@dataclass(frozen=True)
class Case:
    """One configuration of a family.

    config, model: names of transformers' classes.
    ranks: sizes of tensor parallelism at which every unit divides or replicates.
    refused: (arguments, tp, pattern) of configurations that do not fit that many ranks.
    prepare: changes weights that would prove little. save: writes the checkpoint.
    has_cache: transformers continues a cache by one token at a time, as it generates.
    """

    config: str
    model: str
    arguments: dict[str, Any]
    ranks: tuple[int, ...] = (2, 4)
    refused: tuple[tuple[dict[str, Any], int, str], ...] = ()
    prepare: Callable[[Any], None] = _keep
    save: Callable[[Any, Path], None] = field(default=_save)
    has_cache: bool = True

    def build(self, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
        """The model with random weights, the same each time; no vector is all zero or all one."""
        config = getattr(transformers, self.config)(**{**self.arguments, **overrides})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = getattr(transformers, self.model)(config).eval()
        _randomise(model)
        self.prepare(model)
        if model.generation_config is not None:
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
        return model.to(dtype)


def _randomise(model: Any) -> None:
    """A swapped or skipped vector must show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "dt_bias":  # steps from about 0.01 to 1
                tensor.copy_(torch.empty(tensor.shape).uniform_(-4, 0.5, generator=generator))
            elif tensor.dim() == 1 and leaf in ("weight", "bias", "D", "e_score_correction_bias"):
                tensor.add_(torch.empty(tensor.shape).normal_(0, 0.1, generator=generator))


_LLAMA = {**_HEADS, "intermediate_size": 128, "num_hidden_layers": 2}

CASES: dict[str, Case] = {
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
