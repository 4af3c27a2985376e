"""Each kernel against its reference at the sizes and lengths it is made for, and at odd ones."""

import pytest
import torch

from tandem.ops.sampling import reference as sampling_reference
from tests.gpu import cases
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CUDA = "cuda"


@pytest.fixture(scope="module")
def ops():
    """The Triton modules; Triton itself is only there with CUDA."""
    from tandem.ops.activation import triton as activation
    from tandem.ops.attention import triton as attention
    from tandem.ops.conv1d import triton as conv1d
    from tandem.ops.experts import triton as experts
    from tandem.ops.greedy import triton as greedy
    from tandem.ops.latent_attention import triton as latent_attention
    from tandem.ops.norm import triton as norm
    from tandem.ops.rotary import triton as rotary
    from tandem.ops.sampling import triton as sampling
    from tandem.ops.ssd import triton as ssd

    class Ops:
        pass

    Ops.activation, Ops.attention, Ops.conv1d = activation, attention, conv1d
    Ops.greedy = greedy
    Ops.experts, Ops.norm, Ops.ssd = experts, norm, ssd
    Ops.rotary, Ops.sampling, Ops.latent_attention = rotary, sampling, latent_attention
    return Ops


@pytest.mark.parametrize(
    "op", ["activation", "attention", "conv1d", "experts", "norm", "rotary", "sampling", "ssd"]
)
def test_cuda_tensors_go_to_the_kernels(ops, op, monkeypatch):
    from tandem.ops.dispatch import choose

    x = torch.zeros(1, device=CUDA)
    assert choose(op, None, x) is getattr(ops, op)
    monkeypatch.setenv("TANDEM_NATIVE", "0")
    assert choose(op, None, x) is None


@pytest.mark.parametrize(
    ("lengths", "has_state"),
    [
        ([1], [False]),
        ([63], [True]),
        ([257], [False]),
        ([5, 0, 7], [True, True, False]),
        ([0, 3], [False, False]),
        ([64, 1, 128, 65], [True, False, True, False]),
        ([3] * 300, [True, False, True] * 100),
        ([32768], [False]),
        ([30001, 40], [True, True]),
    ],
    ids=str,
)
def test_ssd_prefill(ops, lengths, has_state):
    cases.check_ssd_prefill(ops.ssd, CUDA, lengths, has_state)


@pytest.mark.parametrize("state_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(
    ("heads", "groups", "head_dim", "state_size"), [(6, 3, 5, 7), (3, 1, 80, 16), (2, 2, 64, 128)]
)
def test_ssd_of_any_shape_and_dtype(ops, dtype, state_dtype, heads, groups, head_dim, state_size):
    shape = {"heads": heads, "groups": groups, "head_dim": head_dim, "state_size": state_size}
    dtypes = {"dtype": dtype, "state_dtype": state_dtype}
    rows = ([33, 0, 1, 90], [True, True, False, False])
    cases.check_ssd_prefill(
        ops.ssd, CUDA, *rows, limit=(0.01, 0.5), has_skip=False, **shape, **dtypes
    )
    cases.check_ssd_update(ops.ssd, CUDA, 5, **shape, **dtypes)


@pytest.mark.parametrize("rows", [1, 4, 5, 64, 257])
def test_ssd_update(ops, rows):
    cases.check_ssd_update(ops.ssd, CUDA, rows, heads=8)


def test_ssd_slots_beyond_32_bits_of_elements(ops):
    """Slots far apart: slot index times stride needs 64 bits."""
    stride, num_slots = 3 << 28, 4  # 3.2 GB of fp32 from slot to slot
    buffer = torch.empty(num_slots * stride, device=CUDA)
    state = buffer.as_strided((num_slots, 2, 16, 16), (stride, 256, 16, 1))
    x, B, C = torch.randn(3, 2, 2, 16, device=CUDA, dtype=BF16)
    dt, A, D = (
        torch.randn(2, 2, device=CUDA),
        -torch.rand(2, device=CUDA),
        torch.rand(2, device=CUDA),
    )
    slots = torch.tensor([3, 1], device=CUDA)
    state[slots] = torch.randn(2, 2, 16, 16, device=CUDA)
    expected_state = state[slots].clone()
    rows = torch.arange(2, device=CUDA)
    from tandem.ops.ssd import reference

    expected = reference.ssd_update(x, dt, A, B, C, D, expected_state, rows, A, cases.NO_LIMIT)
    y = ops.ssd.ssd_update(x, dt, A, B, C, D, state, slots, A, cases.NO_LIMIT)
    cases.assert_close(y, expected)
    cases.assert_close(state[slots], expected_state)


@pytest.mark.parametrize(
    ("lengths", "has_state"),
    [
        ([1], [False]),
        ([63], [True]),
        ([257], [False]),
        ([5, 0, 7], [True, True, False]),
        ([1, 2, 3, 1, 4], [True, False, True, False, True]),
        ([2] * 300, [True, False, True] * 100),
        ([32768], [True]),
        ([1], None),
        ([1] * 257, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("channels", [(6, 3, 3), (512, 128, 128)])
def test_conv1d(ops, lengths, has_state, channels):
    cases.check_conv1d(ops.conv1d, CUDA, lengths, has_state, channels=channels)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("taps", [2, 3, 4, 7])
@pytest.mark.parametrize("channels", [(11,), (40, 7), (6, 3, 3, 5)])
def test_conv1d_of_any_taps_and_windows(ops, dtype, taps, channels):
    options = {"dtype": dtype, "taps": taps, "channels": channels}
    cases.check_conv1d(ops.conv1d, CUDA, [9, 1, 40], [True, True, False], **options)
    cases.check_conv1d(ops.conv1d, CUDA, [1, 1], None, activation=None, has_bias=False, **options)


@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize(
    ("lengths", "contexts", "num_decode"),
    [
        ([1], [1], 1),
        ([1], [1], 0),
        ([63], [63], 0),
        ([257], [300], 0),
        ([1, 1, 1], [1, 33, 1000], 3),
        ([1, 1, 5, 0, 70, 1], [9, 32, 5, 20, 131, 1], 2),
        ([2] * 300, [2] * 300, 0),
        ([1] * 300, [17] * 300, 300),
        ([1, 1], [32768, 5], 2),
        ([500], [32768], 0),
        ([8192], [8192], 0),
    ],
    ids=lambda value: str(value)[:40],
)
def test_attention(ops, lengths, contexts, num_decode, page_tokens):
    cases.check_attention(
        ops.attention, CUDA, lengths, contexts, num_decode, page_tokens=page_tokens
    )


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("lengths", "contexts", "num_decode"),
    [
        ([1, 1, 1], [1, 33, 1000], 3),
        ([1, 1, 5, 0, 70, 1], [9, 32, 5, 20, 131, 1], 2),
        ([1] * 40, [17] * 40, 40),
        ([1], [20000], 1),
        ([50], [3000], 0),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize(
    ("heads", "sizes"), [(32, (512, 64)), (4, (512, 64)), (128, (512, 64)), (3, (20, 6))]
)
def test_latent_attention(ops, lengths, contexts, num_decode, heads, sizes, dtype):
    cases.check_latent_attention(
        ops.latent_attention, CUDA, lengths, contexts, num_decode,
        dtype=dtype, heads=heads, value_size=sizes[0], position_size=sizes[1],
    )  # fmt: skip


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [1, 100, 128, 512, 5000])
@pytest.mark.parametrize(
    ("lengths", "contexts", "num_decode"),
    [([1, 1, 1], [1, 33, 1000], 3), ([1, 5, 0, 700], [9, 131, 20, 1500], 1), ([3000], [3000], 0)],
    ids=str,
)
def test_attention_within_a_window(ops, lengths, contexts, num_decode, window, softcap):
    limits = {"window": window, "softcap": softcap}
    cases.check_attention(ops.attention, CUDA, lengths, contexts, num_decode, **limits)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 3), (32, 2), (20, 1)])
@pytest.mark.parametrize(
    ("page_tokens", "head_dim"),
    [(8, 12), (128, 64), (24, 80), (16, 96), (64, 112), (16, 192), (16, 256)],
)
def test_attention_of_any_grouping_and_page(ops, dtype, heads, kv_heads, page_tokens, head_dim):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    cases.check_attention(
        ops.attention, CUDA, [1, 1, 40], [70, 3, 90], 2, dtype=dtype, page_tokens=page_tokens,
        **shape,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(
    ("head_dim", "rot_dim"), [(128, 128), (64, 32), (96, 96), (80, 20), (256, 64)]
)
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 513])
def test_rotary(ops, num_tokens, head_dim, rot_dim, dtype):
    shape = {"head_dim": head_dim, "rot_dim": rot_dim}
    cases.check_rotary(ops.rotary, CUDA, num_tokens, dtype=dtype, **shape)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(
    ("num_tokens", "width"), [(0, 8), (1, 7), (63, 48), (257, 2688), (5, 8192)]
)
def test_norms(ops, num_tokens, width, dtype):
    cases.check_norms(ops.norm, CUDA, num_tokens, width, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(
    ("num_tokens", "groups", "group_size"), [(0, 2, 8), (1, 3, 5), (257, 8, 512), (63, 8, 1024)]
)
def test_gated_norm(ops, num_tokens, groups, group_size, dtype):
    cases.check_gated_norm(ops.norm, CUDA, num_tokens, groups, group_size, dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 8), (1, 7), (257, 1856), (70000, 8)])
def test_activations(ops, num_tokens, width, dtype):
    cases.check_activations(ops.activation, CUDA, num_tokens, width, dtype)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 128, 6), (63, 12, 3), (257, 128, 6), (9, 3, 1)]
)
def test_routing(ops, num_tokens, num_experts, top_k, normalize):
    cases.check_routing(ops.experts, CUDA, num_tokens, num_experts, top_k, normalize)


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_ties", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups"),
    [(128, 6, (1, 1)), (256, 8, (8, 4)), (12, 3, (4, 2)), (3, 1, (3, 2)), (160, 6, (8, 3))],
)
def test_routing_of_any_kind(ops, score, has_bias, has_ties, num_experts, top_k, groups):
    kind = {"score": score, "has_bias": has_bias, "has_ties": has_ties, "groups": groups}
    cases.check_routing(ops.experts, CUDA, 77, num_experts, top_k, True, **kind)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "inputs", "kind"),
    [
        (1, 128, 6, 2688, {}),
        (65, 12, 3, 96, {"groups": (4, 2)}),
        (4000, 128, 6, 2688, {}),
        (1000, 512, 10, 2048, {"score": "softmax", "has_bias": False}),
        (300, 72, 10, 1544, {"score": "softmax", "has_bias": False}),
    ],
)
def test_router_of_many_tokens(num_tokens, num_experts, top_k, inputs, kind):
    from tandem.ops.experts.router_many_triton import route

    cases.check_router(route, CUDA, num_tokens, num_experts, top_k, inputs=inputs, **kind)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "inputs", "kind"),
    [
        (1, 128, 6, 2688, {}),
        (64, 128, 6, 2688, {}),
        (250, 128, 6, 2688, {}),
        (17, 130, 8, 1000, {"score": "softmax", "has_bias": False}),
        (33, 256, 8, 512, {"groups": (8, 4)}),
        (5, 7, 2, 40, {}),
    ],
)
def test_router_of_few_tokens(num_tokens, num_experts, top_k, inputs, kind):
    from tandem.ops.experts.router_few_triton import route

    cases.check_router(route, CUDA, num_tokens, num_experts, top_k, inputs=inputs, **kind)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "shape",
    [
        {"num_experts": 128, "hidden": 2688, "inner": 1856, "shared_inner": 3712, "top_k": 6},
        {"num_experts": 5, "hidden": 36, "inner": 20, "shared_inner": 33, "top_k": 2},
        {"num_experts": 9, "hidden": 1000, "inner": 300, "shared_inner": 120, "top_k": 8},
    ],
    ids=["nano", "odd", "narrow"],
)
def test_experts_and_shared(shape, dtype):
    cases.check_experts_and_shared(CUDA, dtype=dtype, **shape)


def test_routing_of_nan_still_names_experts(ops):
    logits = torch.full((5, 12), torch.nan, device=CUDA)
    _, ids = ops.experts.route(logits, torch.zeros(12, device=CUDA), 3, 1, 1, True, 1.0)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 12


@pytest.mark.parametrize("num_tokens", [1, 63, 700, 1366, 4096])
def test_order_by_expert_is_the_stable_sort(ops, num_tokens):
    ids = torch.randint(0, 127, (num_tokens, 3), device=CUDA)
    order, starts = ops.experts.order_by_expert(ids, 128)
    values, expected = ids.flatten().sort(stable=True)
    assert torch.equal(order.long(), expected)
    assert torch.equal(starts.long(), torch.searchsorted(values, torch.arange(129, device=CUDA)))


@pytest.mark.parametrize("activation", ["relu2", "silu_gated"])
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 17, 200, 1500])
def test_experts(ops, num_tokens, activation):
    cases.check_experts(ops.experts, CUDA, num_tokens, activation)


@pytest.mark.parametrize("activation", ["relu2", "silu_gated"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "top_k", "hidden", "inner"),
    [
        (4100, 7, 1, 1, 128, 64),  # all tokens to one expert
        (4097, 128, 128, 1, 264, 520),  # fewer rows than half a tile, ends narrower than a tile
        (1100, 9, 5, 4, 328, 136),
        (2000, 300, 299, 3, 64, 72),
        (6001, 128, 6, 6, 2688, 1856),
    ],
)
def test_experts_of_many_tokens(
    ops, activation, num_tokens, num_experts, num_chosen, top_k, hidden, inner
):
    shape = {"num_experts": num_experts, "num_chosen": num_chosen, "top_k": top_k}
    cases.check_experts(
        ops.experts, CUDA, num_tokens, activation, hidden=hidden, inner=inner, **shape
    )


@pytest.mark.parametrize("activation", ["relu2", "silu_gated"])
def test_experts_of_many_tokens_without_hopper(ops, activation, monkeypatch):
    monkeypatch.setattr(ops.experts.prefill_triton, "_is_hopper", lambda device: False)
    shape = {"num_experts": 9, "top_k": 2, "hidden": 328, "inner": 136}
    cases.check_experts(ops.experts, CUDA, 4097, activation, **shape)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 3), (700, 128), (3000, 300)])
def test_places_of_pairs_and_their_tiles(num_tokens, num_experts):
    cases.check_places(CUDA, num_tokens, num_experts)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("num_tokens", [3, 33])
def test_experts_of_odd_shape(ops, dtype, num_tokens):
    cases.check_experts(
        ops.experts,
        CUDA,
        num_tokens,
        "silu_gated",
        dtype=dtype,
        num_experts=5,
        hidden=36,
        inner=20,
        top_k=2,
    )


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("sharpness", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("cuts", ["", "k", "p", "m", "kp", "pm", "kpm"])
@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 300), (67, 32000), (16, 131072), (5, 262144)])
def test_draw(ops, num_rows, vocab, cuts, sharpness, has_ties):
    cases.check_draw(
        ops.sampling, CUDA, num_rows, vocab, cuts, sharpness=sharpness, has_ties=has_ties,
        num_apart=num_rows // 16,
    )  # fmt: skip


@pytest.mark.parametrize("cuts", ["", "k", "p", "m"])
def test_draws_follow_the_distribution(ops, cuts):
    """A chi-square test: of 60,000 draws, as many of each token as its probability says."""
    num_draws, vocab = 60_000, 24
    one = cases.sampling_problem(CUDA, 1, vocab, cuts, 1.0, False)
    logits = one[0][2:3].expand(num_draws, vocab).contiguous()
    rows = torch.arange(num_draws, device=CUDA)
    each = [column.expand(num_draws).contiguous() for column in one[2:7]]
    each[1] = torch.rand(num_draws, dtype=torch.float64, device=CUDA)
    tokens = ops.sampling.draw(logits, rows, *each, 0, None, rows if cuts else None)
    found = torch.bincount(tokens, minlength=vocab).double()
    # The share of [0, 1) that draws a token, by the reference at a fine grid of uniforms.
    grid = (torch.arange(1 << 15, device=CUDA, dtype=torch.float64) + 0.5) / (1 << 15)
    few = [column[: len(grid)] for column in (rows, *each)]
    few[2] = grid
    fine = sampling_reference.draw(logits[: len(grid)], *few, 0, None, few[0] if cuts else None)
    expected = torch.bincount(fine, minlength=vocab).double() / len(grid) * num_draws
    assert not bool(found[expected == 0].any())
    is_likely = expected > 5
    chi2 = ((found - expected)[is_likely] ** 2 / expected[is_likely]).sum()
    assert float(chi2) < 60  # 23 degrees of freedom at most: one in 40,000


@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 7), (33, 131072)])
def test_penalties(ops, num_rows, vocab):
    cases.check_penalties(ops.sampling, CUDA, num_rows, vocab)


@pytest.mark.parametrize("rows", [0, 7, 300])
def test_packed_linear_is_the_plain_product(rows):
    from tandem.ops.linear import PackedLinear

    weight = torch.randn(96, 64, device=CUDA, dtype=BF16)
    bias = torch.randn(96, device=CUDA).bfloat16()
    x = torch.randn(rows, 64, device=CUDA, dtype=BF16)
    packed = PackedLinear(weight, bias)
    assert not packed.is_native
    exact = x.float() @ weight.float().T
    assert_close(packed(x), exact + bias.float())
    assert_close(packed(x, "relu2"), (exact + bias.float()).relu().square())
    assert_close(packed(x[:, None]), (exact + bias.float())[:, None])
    plain = PackedLinear(weight)
    wide = plain.wide(x)
    assert wide.dtype is FP32
    torch.testing.assert_close(wide, exact, rtol=1e-5, atol=1e-4)
    out = torch.full_like(wide, torch.nan)
    assert plain.wide(x, out) is out
    assert torch.equal(out, wide)
    ids = torch.tensor([5, 0], device=CUDA)
    assert torch.equal(packed.embedding(ids), weight[ids])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 131072), (70, 131072), (3, 32001), (5, 1)])
def test_best_tokens(ops, rows, vocab, dtype):
    cases.check_best_tokens(ops.greedy, CUDA, rows, vocab, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 33, 64])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(10304, 2688), (2688, 4096), (72, 21504), (131, 1001), (33, 8)]
)
def test_linear(ops, rows, num_outputs, num_inputs, dtype):
    cases.check_linear(CUDA, rows, num_outputs, num_inputs, dtype=dtype)
    more = {"activation": "relu2", "has_bias": True, "out_dtype": FP32}
    cases.check_linear(CUDA, rows, num_outputs, num_inputs, dtype=dtype, **more)


def test_kernels_that_start_early_see_all_that_was_launched_before(ops):
    """A chain of short kernels that read what the one before wrote, over one pair of buffers."""
    from tandem.ops import dependent
    from tandem.ops.linear import triton as linear

    weights = [torch.randn(512, 512, device=CUDA, dtype=BF16) * 0.06 for _ in range(24)]
    norm = torch.ones(512, device=CUDA, dtype=BF16)
    counts = linear.counters(weights[0])

    def chain(x):
        residual = x
        for weight in weights:
            normed, residual = ops.norm.add_rms_norm(x, residual, norm, 1e-5)
            tiles = {"BN": 64, "BK": 128, "IS_TURNED": 1, "RUNS": 2, "num_warps": 4}
            if len(x) == 1:
                tiles = linear.linear_tiles(1, 512, 512, 132)
            x = linear.launch(normed, weight, None, counts, "relu2", None, tiles)
        return x

    for rows in (1, 5, 64):
        x = torch.randn(rows, 512, device=CUDA, dtype=BF16)
        dependent.is_enabled = False
        try:
            expected = chain(x)
        finally:
            dependent.is_enabled = True
        for _ in range(2):
            assert torch.equal(chain(x), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(x)
        for _ in range(20):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, expected)
