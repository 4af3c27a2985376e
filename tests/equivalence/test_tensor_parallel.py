"""Ranks as threads give the logits of one rank, for every layer and every way of sharing units."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.stepper import Stepper, random_tokens
from tests.tiny_models import save_tiny

TOKENS = random_tokens(40)
BIASED = {"use_bias": True, "mlp_bias": True}

CASES = {
    "groups_cut": ("nemotron_h", {"n_groups": 4}),
    "groups_replicated": ("nemotron_h", {"n_groups": 2}),
    "one_group": ("nemotron_h", {"n_groups": 1}),
    "projections_with_bias": ("nemotron_h", BIASED),
    "vocabulary_that_does_not_divide": ("nemotron_h", {"vocab_size": 509}),
    "experts": ("nemotron_h_moe", {}),
    "latent_experts": ("nemotron_h_latent", {"mlp_bias": True}),
    "rotary_one_group": ("bamba", {"mamba_n_groups": 1}),
    "rotary_with_bias": ("bamba", {"attention_bias": True, "mamba_proj_bias": True}),
    "one_kv_head_tied": ("bamba", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
}


def run(folder: Path, tp: int) -> list[torch.Tensor]:
    """Whole prompt, a continuation beside decode rows, then decode."""
    stepper = Stepper(folder, tp=tp)
    logits = stepper.step([(0, TOKENS[:17]), (1, TOKENS[:3]), (2, TOKENS[:1])])
    logits += stepper.step([(1, TOKENS[3:4]), (0, TOKENS[17:30]), (2, TOKENS[1:2])])
    logits += stepper.step([(0, TOKENS[30:31]), (1, TOKENS[4:5]), (2, TOKENS[2:3])])
    return logits


@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_rank(name: str, tmp_path: Path) -> None:
    family, overrides = CASES[name]
    folder = save_tiny(family, tmp_path, **overrides)
    _spread_energy(folder / "model.safetensors")
    expected = run(folder, 1)
    for tp in (2, 4):
        for actual, reference in zip(run(folder, tp), expected, strict=True):
            assert actual.shape == reference.shape
            torch.testing.assert_close(
                actual, reference, rtol=0, atol=2e-5 * float(reference.abs().max())
            )


def _spread_energy(file: Path) -> None:
    """Make the groups of each gated norm differ in energy: a norm over wrong channels shows."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(".D"):
            tensor.mul_(torch.linspace(0.2, 5, len(tensor)))
        elif name.endswith(("mlp.bias", "proj.bias")):
            tensor.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(3))
    save_file(tensors, file, metadata={"format": "pt"})
