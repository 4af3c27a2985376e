"""The Triton kernels on Triton's interpreter, small cases in fp32: its bf16 products are wrong.

Runs where Triton is installed and no GPU is; tests/gpu has the real cases.
"""

import importlib.util

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels themselves", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tandem.ops.activation import triton as activation
from tandem.ops.attention import triton as attention
from tandem.ops.conv1d import triton as conv1d
from tandem.ops.delta_rule import triton as delta_rule
from tandem.ops.experts import triton as experts
from tandem.ops.greedy import triton as greedy
from tandem.ops.latent_attention import triton as latent_attention
from tandem.ops.norm import triton as norm
from tandem.ops.norm_gate import triton as norm_gate
from tandem.ops.rg_lru import triton as rg_lru
from tandem.ops.rotary import triton as rotary
from tandem.ops.sampling import triton as sampling
from tandem.ops.ssd import triton as ssd
from tandem.ops.tuning import trying
from tests.gpu import cases

SMALL = {"dtype": torch.float32, "heads": 2, "groups": 1, "head_dim": 5, "state_size": 7}


@pytest.mark.parametrize(
    ("lengths", "has_state"),
    [
        ([5, 0, 20], [True, True, False]),
        ([33], [True]),
        ([1], [False]),
        ([150], [True]),  # in segments
        ([140, 3], [False, True]),
    ],
)
def test_ssd_prefill(lengths, has_state):
    cases.check_ssd_prefill(ssd, "cpu", lengths, has_state, **SMALL)


@pytest.mark.parametrize("rows", [1, 5])
def test_ssd_update(rows):
    cases.check_ssd_update(ssd, "cpu", rows, **SMALL)


@pytest.mark.parametrize(
    ("lengths", "has_state"),
    [
        ([5, 0, 40], [True, True, False]),
        ([1, 2, 1], [True, False, False]),
        ([1, 1, 1], None),
    ],
)
@pytest.mark.parametrize("taps", [2, 4])
def test_conv1d(lengths, has_state, taps):
    cases.check_conv1d(conv1d, "cpu", lengths, has_state, dtype=torch.float32, taps=taps)


@pytest.mark.parametrize(
    ("lengths", "contexts", "num_decode"),
    [([1, 1], [150, 3], 2), ([1, 5, 0, 17], [9, 5, 20, 40], 1), ([20], [70], 0)],
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (37, 2.0)])
def test_attention(lengths, contexts, num_decode, window, softcap):
    options = {"dtype": torch.float32, "heads": 6, "head_dim": 12}
    cases.check_attention(
        attention, "cpu", lengths, contexts, num_decode, window=window, softcap=softcap, **options
    )


@pytest.mark.parametrize(
    ("lengths", "contexts", "num_decode"),
    [([1, 1], [150, 3], 2), ([1, 5, 0, 17], [9, 5, 20, 40], 1), ([20], [70], 0)],
)
@pytest.mark.parametrize(("heads", "sizes"), [(4, (16, 8)), (3, (20, 6)), (80, (12, 4))])
def test_latent_attention(lengths, contexts, num_decode, heads, sizes):
    cases.check_latent_attention(
        latent_attention, "cpu", lengths, contexts, num_decode,
        dtype=torch.float32, heads=heads, value_size=sizes[0], position_size=sizes[1],
    )  # fmt: skip


@pytest.mark.parametrize(("head_dim", "rot_dim"), [(16, 16), (12, 4), (20, 10)])
@pytest.mark.parametrize("num_tokens", [0, 1, 21])
def test_rotary(num_tokens, head_dim, rot_dim):
    shape = {"heads": 3, "kv_heads": 1, "head_dim": head_dim, "rot_dim": rot_dim}
    cases.check_rotary(rotary, "cpu", num_tokens, dtype=torch.float32, **shape)


@pytest.mark.parametrize(
    ("vocab", "cuts", "has_ties"),
    [
        (7, "kp", False),
        (60, "p", True),
        (200, "", True),
        (200, "k", True),
        (200, "m", False),
        (200, "kpm", True),
        (300, "pm", False),
        (300, "p", False),
    ],
)
def test_draw(vocab, cuts, has_ties, monkeypatch):
    # Small ones, so that every search runs: among 64 tokens, within a bracket, over all tokens.
    for name, value in (
        ("_RUN", 16),
        ("_RUNS", 4),
        ("_MOST", 64),
        ("_FLAT", 64),
        ("_TILE", 256),
        ("_DEPTHS", 4),
    ):
        monkeypatch.setattr(sampling, name, value)
    cases.check_draw(sampling, "cpu", 3, vocab, cuts, has_ties=has_ties, sharpness=1.0)


def test_penalties():
    cases.check_penalties(sampling, "cpu", 3, 50)


def test_norms():
    cases.check_norms(norm, "cpu", 3, 48, torch.float32)
    cases.check_gated_norm(norm, "cpu", 3, 3, 20, torch.float32)


def test_activations():
    cases.check_activations(activation, "cpu", 3, 24, torch.float32)


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"score": "softmax", "has_bias": False},
        {"groups": (4, 2), "has_ties": True},
        {"groups": (4, 3), "score": "softmax", "has_bias": False, "has_ties": True},
        {"groups": (12, 5)},
    ],
    ids=str,
)
def test_routing(kind):
    cases.check_routing(experts, "cpu", 5, 12, 3, True, **kind)


@pytest.mark.parametrize(
    ("num_experts", "kind"),
    [(12, {"groups": (4, 2)}), (130, {"score": "softmax", "has_bias": False})],
)
def test_router_of_many_tokens(num_experts, kind):
    from tandem.ops.experts.router_many_triton import route

    cases.check_router(route, "cpu", 70, num_experts, 3, dtype=torch.float32, **kind)


@pytest.mark.parametrize(
    ("num_tokens", "kind"),
    [(1, {}), (5, {"groups": (4, 2)}), (18, {"score": "softmax", "has_bias": False})],
)
def test_router_of_few_tokens(num_tokens, kind):
    from tandem.ops.experts.router_few_triton import route

    shape = {"inputs": 300, "dtype": torch.float32}
    cases.check_router(route, "cpu", num_tokens, 12, 3, **shape, **kind)


@pytest.mark.parametrize("shared_inner", [40, 33, 7])
def test_experts_and_shared(shared_inner):
    shape = {"num_experts": 4, "hidden": 24, "inner": 20, "top_k": 2}
    tiles = {"BN": 4, "BK": 16, "num_warps": 1}
    with trying("experts_one_up", tiles), trying("experts_one_down", tiles):
        cases.check_experts_and_shared(
            "cpu", dtype=torch.float32, shared_inner=shared_inner, **shape
        )


@pytest.mark.parametrize("num_tokens", [0, 3, 9])
@pytest.mark.parametrize("kind", ["relu2", "silu_gated"])
def test_experts(kind, num_tokens):
    shape = {"num_experts": 4, "hidden": 24, "inner": 20, "top_k": 2}
    cases.check_experts(experts, "cpu", num_tokens, kind, dtype=torch.float32, **shape)


# The rows between those of two experts are never written: products of what lies there may overflow.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("kind", ["relu2", "silu_gated"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "hidden", "inner"),
    [(9, 4, 3, 24, 20), (135, 3, 2, 12, 24), (7, 3, 2, 12, 264)],
)
def test_experts_of_many_tokens(
    kind, num_tokens, num_experts, num_chosen, hidden, inner, monkeypatch
):
    monkeypatch.setattr(experts, "_MIN_ROWS", 0)
    shape = {"num_experts": num_experts, "num_chosen": num_chosen, "top_k": 2}
    cases.check_experts(
        experts, "cpu", num_tokens, kind, dtype=torch.float32, hidden=hidden, inner=inner, **shape
    )


DELTA = {"dtype": torch.float32, "heads": 2, "groups": 1, "key": 6, "value": 20}


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("floor", [None, -5.0])
def test_delta_update(by_channel, floor):
    cases.check_delta_update(delta_rule, "cpu", 3, by_channel=by_channel, floor=floor, **DELTA)


def test_delta_rule_rounds_fp16_state_at_random():
    options = {"state_dtype": torch.float16, "is_random": True, **DELTA}
    cases.check_delta_update(delta_rule, "cpu", 3, **options)
    cases.check_delta_prefill(delta_rule, "cpu", [20, 0], [True, True], **options)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(
    ("lengths", "has_state"), [([5, 0, 20], [True, True, False]), ([1], [False]), ([33], [True])]
)
def test_delta_prefill(lengths, has_state, by_channel):
    cases.check_delta_prefill(delta_rule, "cpu", lengths, has_state, by_channel=by_channel, **DELTA)


@pytest.mark.parametrize(
    ("tokens", "by_channel", "rate"),
    [
        (32, False, 1.0),
        (32, True, 1.0),
        (16, True, 50.0),  # channels that forget all within a block, beside others that do not
        (32, True, 50.0),
    ],
)
def test_delta_prefill_in_chunks_of_one_or_two_blocks(tokens, by_channel, rate):
    tiles = {"BT": tokens, "BV": 16, "num_warps": 4, "num_stages": 3, "pair_warps": 4}
    with trying("delta_prefill", tiles):
        cases.check_delta_prefill(
            delta_rule,
            "cpu",
            [100, 3],
            [True, False],
            max_beta=2.0,
            by_channel=by_channel,
            rate=rate,
            **DELTA,
        )


@pytest.mark.parametrize(
    ("lengths", "has_state"),
    [
        ([5, 0, 140], [True, True, False]),  # the last in segments
        ([70, 3], [True, True]),
        ([33], [False]),
        ([1, 1], None),
    ],
)
def test_rg_lru(lengths, has_state):
    cases.check_rg_lru(rg_lru, "cpu", lengths, has_state, dtype=torch.float32, blocks=3, width=7)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_norm_gate(activation):
    cases.check_norm_gate(norm_gate, "cpu", 3, 3, 20, activation, torch.float32)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 3), (400, 5)])
def test_places_of_pairs_and_their_tiles(num_tokens, num_experts):
    cases.check_places("cpu", num_tokens, num_experts)


@pytest.mark.parametrize(
    ("rows", "tiles"),
    [
        (1, {"BN": 4, "BK": 128}),
        (1, {"BN": 16, "BK": 32}),
        (1, {"BN": 8, "BK": 16}),
        (3, {"BN": 16, "BK": 16, "RUNS": 1, "IS_TURNED": 1}),
        (17, {"BN": 16, "BK": 32, "RUNS": 2, "IS_TURNED": 0}),
        (5, {"BN": 32, "BK": 16, "RUNS": 4, "IS_TURNED": 1}),
    ],
)
@pytest.mark.parametrize("activation", [None, "relu2"])
def test_linear(rows, tiles, activation):
    tiles = tiles | {"num_warps": 4}
    shape = (rows, 37, 72)
    kinds = {"dtype": torch.float32, "activation": activation, "has_bias": rows == 5}
    cases.check_linear("cpu", *shape, tiles=tiles, **kinds)


@pytest.mark.parametrize(("rows", "vocab"), [(1, 9000), (5, 700), (3, 1)])
def test_best_tokens(rows, vocab):
    cases.check_best_tokens(greedy, "cpu", rows, vocab)
