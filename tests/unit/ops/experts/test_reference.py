"""Routing and experts against a loop over tokens in float64, and against transformers."""

import pytest
import torch
import torch.nn.functional as F
from transformers import NemotronHConfig, Qwen3NextConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE, NemotronHTopkRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

from tandem.errors import ShapeError
from tandem.ops.activation import activate
from tandem.ops.experts.reference import _MAX_SORTED, experts_mlp, route
from tests.tolerances import assert_close


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def nemotron_config(**changes):
    settings = {
        "vocab_size": 64,
        "hidden_size": 24,
        "hybrid_override_pattern": "ME",
        "mamba_num_heads": 2,
        "mamba_head_dim": 12,
        "n_groups": 1,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 10,
        "moe_shared_expert_intermediate_size": 14,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    return NemotronHConfig(**(settings | changes))


CONFIGS = [
    {},
    {"norm_topk_prob": False},
    {"n_group": 1, "topk_group": 1},
    {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.0},
    {"num_experts_per_tok": 1},
]


def by_expert(weights, ids, num_experts):
    """[T, E], zero for experts not chosen: the order of the k is not defined."""
    dense = torch.zeros(len(ids), num_experts, dtype=weights.dtype)
    return dense.scatter(1, ids, weights)


def route_as(config, logits, bias):
    return route(
        logits,
        bias,
        config.num_experts_per_tok,
        config.n_group,
        config.topk_group,
        config.norm_topk_prob,
        config.routed_scaling_factor,
    )


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 63])
def test_routing_equals_transformers(changes, num_tokens):
    config = nemotron_config(**changes)
    router = NemotronHTopkRouter(config)
    router.weight.data = randn(12, 24).float()
    # As large as the scores: it has to decide the choice and stay out of the weights.
    router.e_score_correction_bias.copy_(randn(12, seed=1).float())
    x = randn(num_tokens, 24, seed=2).float()
    with torch.no_grad():
        logits, expected_weights, expected_ids = router(x)
    weights, ids = route_as(config, logits, router.e_score_correction_bias)

    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert torch.equal(ids.sort(-1).values, expected_ids.sort(-1).values)
    assert_close(by_expert(weights, ids, 12), by_expert(expected_weights, expected_ids, 12))


def test_correction_bias_changes_the_choice_but_not_the_weight():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    bias = torch.tensor([10.0, 0.0, 0.0, 0.0])
    weights, ids = route(logits, bias, 2, 1, 1, False, 1.0)
    assert sorted(ids[0].tolist()) == [0, 3]
    assert_close(by_expert(weights, ids, 4)[0, [0, 3]], logits.sigmoid()[0, [0, 3]])


def test_groups_of_one_expert():
    weights, ids = route(torch.tensor([[3.0, 1.0, 2.0]]), torch.zeros(3), 1, 3, 2, True, 1)
    assert ids.tolist() == [[0]]
    assert weights.tolist() == [[1.0]]


def test_scores_that_underflow_do_not_become_nan():
    weights, _ = route(torch.full((1, 4), -200.0), torch.zeros(4), 2, 1, 1, True, 1.0)
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_routing_equals_transformers(normalize):
    config = Qwen3NextConfig(
        hidden_size=24, num_experts=12, num_experts_per_tok=3, norm_topk_prob=normalize
    )
    router = Qwen3NextTopKRouter(config)
    router.weight.data = randn(12, 24).float()
    x = randn(9, 24, seed=2).float()
    _, expected_weights, expected_ids = router(x)
    weights, ids = route(F.linear(x, router.weight), None, 3, 1, 1, normalize, 1.0, score="softmax")
    assert torch.equal(ids, expected_ids)
    assert_close(weights, expected_weights)


def test_normalized_softmax_is_the_softmax_over_the_chosen():
    logits = randn(9, 12).float()
    weights, ids = route(logits, None, 4, 1, 1, True, 1.0, score="softmax")
    expected_logits, expected_ids = logits.topk(4)
    assert torch.equal(ids, expected_ids)
    assert_close(weights, expected_logits.softmax(-1))


@pytest.mark.parametrize("num_tokens", [1, _MAX_SORTED + 1])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_of_equal_scores_the_lowest_ids_are_chosen_in_order(num_tokens, score):
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0]]).repeat(num_tokens, 1)
    _, ids = route(logits, None, 4, 1, 1, False, 1.0, score=score)
    assert ids.tolist() == [[1, 3, 0, 2]] * num_tokens
    _, ids = route(logits[:, :4], None, 2, 2, 1, False, 1.0, score=score)  # two equal groups
    assert ids.tolist() == [[1, 0]] * num_tokens


def test_an_unknown_score_is_refused():
    with pytest.raises(ShapeError, match="score='tanh' is unknown; use one of sigmoid, softmax"):
        route(torch.zeros(1, 4), None, 2, 1, 1, False, 1.0, score="tanh")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["relu2", "silu_gated"])
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_experts_equal_loop_over_tokens(num_tokens, activation, dtype):
    num_experts, hidden, inner, top_k = 5, 12, 7, 2
    width = inner * (2 if activation == "silu_gated" else 1)
    x = (randn(num_tokens, hidden) / 2).to(dtype)
    up = (randn(num_experts, width, hidden, seed=1) / 3).to(dtype)
    down = (randn(num_experts, hidden, inner, seed=2) / 3).to(dtype)
    scores = randn(num_tokens, num_experts - 1, seed=3)  # the last expert gets no token
    weights, ids = scores.softmax(-1).float().topk(top_k)
    up[-1] = torch.nan

    expected = torch.zeros(num_tokens, hidden, dtype=torch.float64)
    for t in range(num_tokens):
        for weight, expert in zip(weights[t], ids[t], strict=True):
            inside = activate(up[expert].double() @ x[t].double(), activation)
            expected[t] += weight.double() * (down[expert].double() @ inside)
    out = experts_mlp(x, up, down, weights, ids, activation)
    assert out.dtype == dtype
    assert_close(out, expected)


@pytest.mark.parametrize("latent", [None, 16])
@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_moe_layer_of_transformers_is_these_ops(changes, latent):
    """Router, latent projections, routed and shared experts, put together as in a layer."""
    config = nemotron_config(moe_latent_size=latent, **changes)
    moe = NemotronHMoE(config)
    for index, tensor in enumerate([*moe.parameters(), moe.gate.e_score_correction_bias]):
        tensor.data = randn(*tensor.shape, seed=index).float() / 2
    x = randn(9, 24, seed=99).float()
    with torch.no_grad():
        expected = moe(x.unsqueeze(0)).squeeze(0)
        logits = F.linear(x, moe.gate.weight)
        weights, ids = route_as(config, logits, moe.gate.e_score_correction_bias)
        routed = experts_mlp(
            moe.fc1_latent_proj(x),
            moe.experts.up_proj,
            moe.experts.down_proj,
            weights,
            ids,
            "relu2",
        )
        shared = moe.shared_experts
        out = moe.fc2_latent_proj(routed) + shared.down_proj(activate(shared.up_proj(x), "relu2"))
    assert_close(out, expected)
