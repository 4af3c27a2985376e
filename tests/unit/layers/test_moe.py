from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tandem.config.model import MoeConfig
from tandem.layers.moe import Moe
from tests.stepper import ThreadGroup
from tests.unit.layers.building import HIDDEN, batch_of, build, context, stored_tensors

X = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
CONFIG = MoeConfig(
    num_experts=6,
    top_k=2,
    intermediate_size=8,
    shared_intermediate_size=12,
    latent_size=None,
    activation="relu2",
    num_groups=3,
    topk_groups=2,
    normalize_weights=True,
    scaling_factor=2.0,
    has_bias=False,
)


def expected(config: MoeConfig, stored: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """One token, by the definition."""

    def project(name: str, value: torch.Tensor) -> torch.Tensor:
        return F.linear(value, stored[f"{name}.weight"], stored.get(f"{name}.bias"))

    def mlp(name: str, value: torch.Tensor) -> torch.Tensor:
        inner = project(f"{name}.up_proj", value)
        if config.activation == "silu_gated":
            inner = F.silu(project(f"{name}.gate_proj", value)) * inner
        else:
            inner = inner.relu() ** 2
        return project(f"{name}.down_proj", inner)

    logits = project("gate", x)
    scores = logits.sigmoid() if config.score == "sigmoid" else logits.softmax(-1)
    corrected = scores + stored.get("gate.e_score_correction_bias", torch.tensor(0.0))
    best_groups = corrected.view(3, 2).sum(1).topk(config.topk_groups).indices.tolist()
    allowed = [expert for expert in range(6) if expert // 2 in best_groups]
    chosen = sorted(allowed, key=lambda e: -float(corrected[e]))[: config.top_k]
    total = sum(scores[expert] for expert in chosen) if config.normalize_weights else 1.0
    inner = project("fc1_latent_proj", x) if config.latent_size else x
    out = torch.stack(
        [scores[e] / total * config.scaling_factor * mlp(f"experts.{e}", inner) for e in chosen]
    ).sum(0)
    out = project("fc2_latent_proj", out) if config.latent_size else out
    if not config.shared_intermediate_size:
        return out
    gate = project("shared_gate", x).sigmoid() if config.has_shared_gate else 1.0
    return out + gate * mlp("shared_experts", x)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"shared_intermediate_size": 0},
        {"latent_size": 10, "has_bias": True},
        {"latent_size": 10, "shared_intermediate_size": 0},
        {"activation": "silu_gated", "score": "softmax", "has_correction_bias": False},
        {"score": "softmax", "normalize_weights": False, "has_shared_gate": True},
    ],
)
def test_ranks_hold_the_same_experts(change: dict, tp: int) -> None:
    config = replace(CONFIG, **change)
    stored = stored_tensors(Moe, config)
    reference = torch.stack([expected(config, stored, x) for x in X])
    batch = batch_of(len(X))
    for out in ThreadGroup(tp).run(
        lambda rank: build(Moe, config, stored, context(rank))(X, batch)
    ):
        torch.testing.assert_close(out, reference)


def test_router_is_fp32_in_a_16_bit_model() -> None:
    weights = Moe.weights(CONFIG, context(dtype=torch.bfloat16))
    assert {name for name, weight in weights.items() if weight.dtype is torch.float32} == {
        "gate.weight",
        "gate.bias",
    }


def test_choices_are_left_for_whoever_counts_them() -> None:
    routing: list[torch.Tensor] = []
    build(Moe, CONFIG, stored_tensors(Moe, CONFIG), context())(X, batch_of(len(X), routing))
    (ids,) = routing
    assert ids.shape == (len(X), CONFIG.top_k)
    assert 0 <= int(ids.min()) <= int(ids.max()) < CONFIG.num_experts
