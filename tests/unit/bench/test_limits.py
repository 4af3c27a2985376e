"""Counted weights and bytes are those of real checkpoints, and floors follow from them."""

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.bench import limits
from tandem.bench.limits import (
    AttentionWork,
    ExpertLayer,
    Machine,
    Work,
    attention_flops,
    count_work,
    decode_floor_s,
    feed_forward_parameters,
    prefill_floor_s,
)
from tandem.config.model import (
    AttentionConfig,
    LatentAttentionConfig,
    Mamba1Config,
    MlpConfig,
    MoeConfig,
    SharedBlockConfig,
)
from tandem.models.registry import load_model_config
from tandem.state.spec import build_state_spec
from tests.equivalence.families.cases import CASES
from tests.tiny_models import TINY, build_tiny

MACHINE = Machine(bytes_per_s=1e9, flops_per_s=1e10, threads=1)
MAMBA = Mamba1Config(32, 8, 4, 4, True, False)
MLP = MlpConfig(32, "gelu_gated", False)
WORK = Work(
    num_weights=1000,
    num_used_weights=400,
    weight_nbytes=2000,
    state_nbytes=300,
    num_head_weights=20,
    attention=(AttentionWork(nbytes_per_token=7, flops=6),),
    experts=(ExpertLayer(num_experts=8, top_k=2, num_weights=100),),
)


# In a model's names; .D and dt_proj_bias have a row for each head in Zamba.
_NO_MATRICES = ("embed", "conv", "A_log", ".D", "dt_proj_bias")


def count_matrices(model: object) -> int:
    """Matrix weights of a transformers model: the embedding is read by row, windows and decays are
    no matrices."""
    return sum(
        tensor.numel()
        for name, tensor in model.named_parameters()  # type: ignore[attr-defined]
        if tensor.dim() > 1 and not any(item in name.split(".", 1)[1] for item in _NO_MATRICES)
    )


@pytest.mark.parametrize("name", TINY)
def test_weights_are_counted_as_checkpoints_have_them(name: str, tmp_path: Path) -> None:
    config, model = build_tiny(name)
    config.save_pretrained(tmp_path)
    ours = load_model_config(tmp_path)
    work = count_work(ours)
    assert work.num_weights == count_matrices(model)
    assert work.weight_nbytes == 4 * work.num_weights
    spec = build_state_spec(ours, tp=1, rank=0, page_tokens=16)
    assert work.state_nbytes == spec.slot_nbytes
    assert sum(item.nbytes_per_token for item in work.attention) * 16 == spec.page_nbytes


@pytest.mark.parametrize(
    "name", ["jamba", "kimi_linear", "minimax", "qwen3_next", "recurrent_gemma", "zamba"]
)
def test_every_kind_is_counted(name: str, tmp_path: Path) -> None:
    """A tied head counts; what layers share counts at each use."""
    model = CASES[name].build()
    model.config.save_pretrained(tmp_path)
    ours = load_model_config(tmp_path)
    expected = count_matrices(model) + (512 * 64 if ours.tie_embeddings else 0)
    if name == "zamba":
        shared = [tensor for key, tensor in model.named_parameters() if ".shared_transf." in key]
        expected += 2 * sum(tensor.numel() for tensor in shared if tensor.dim() > 1)
    assert count_work(ours).num_weights == expected


def test_attention_is_counted_by_its_widths() -> None:
    attention = AttentionConfig(4, 2, 16, 1.0, False, None)
    latent = LatentAttentionConfig(4, 32, 24, 16, 20, 1.0, False, None)
    assert attention_flops(attention) == 4 * (16 + 16) * 2
    assert attention_flops(latent) == 4 * (48 + 32) * 2
    block = SharedBlockConfig(0, True, attention, MLP, MAMBA, 1e-5)
    assert attention_flops(block) == attention_flops(attention)
    assert attention_flops(MAMBA) == 0


def test_attention_within_a_window_sees_no_more(tmp_path: Path) -> None:
    config = CASES["recurrent_gemma"].build().config
    config.save_pretrained(tmp_path)
    ours = load_model_config(tmp_path)
    mixer = next(
        item for layer in ours.layers for item in layer.mixers if isinstance(item, AttentionConfig)
    )
    (counted,) = count_work(ours).attention
    assert counted.window == mixer.window == config.attention_window_size
    layers = sum(isinstance(item, AttentionConfig) for each in ours.layers for item in each.mixers)
    assert counted.nbytes_per_token == layers * 2 * mixer.num_kv_heads * mixer.head_dim * 4
    seen = [min(query + 1, 4) for query in range(9)]
    windowed = AttentionWork(nbytes_per_token=7, flops=6, window=4)
    assert windowed.num_pairs(9) == sum(seen)
    assert windowed.num_pairs(3) == 1 + 2 + 3
    fast = replace(MACHINE, bytes_per_s=1e20)
    work = replace(WORK, attention=(*WORK.attention, windowed))
    more = prefill_floor_s(work, fast, 9, 2) - prefill_floor_s(WORK, fast, 9, 2)
    assert more == pytest.approx(2 * 6 * sum(seen) / 1e10)
    more = decode_floor_s(work, MACHINE, 1, 10) - decode_floor_s(WORK, MACHINE, 1, 10)
    assert more == pytest.approx(7 * 4 / 1e9)


@pytest.mark.parametrize("name", TINY)
def test_a_token_uses_all_weights_but_those_of_other_experts(name: str, tmp_path: Path) -> None:
    config, _ = build_tiny(name)
    config.save_pretrained(tmp_path)
    ours = load_model_config(tmp_path)
    work = count_work(ours)
    unused = 0
    for layer in ours.layers:
        if isinstance(layer.feed_forward, MoeConfig):
            moe = layer.feed_forward
            width = moe.latent_size or ours.hidden_size
            unused += (moe.num_experts - moe.top_k) * 2 * width * moe.intermediate_size
            held, used = feed_forward_parameters(moe, ours.hidden_size)
            assert held > used
    assert work.num_weights - work.num_used_weights == unused
    assert (unused > 0) == name.startswith("nemotron_h_")


def test_prefill_is_bound_by_products_and_attention() -> None:
    fast = replace(MACHINE, bytes_per_s=1e15)
    # The head works for the last token alone; a token attends to itself and all before it.
    flops = 2 * 380 * 100 + 2 * 20 + 6 * 100 * 101 / 2
    assert prefill_floor_s(WORK, fast, 100) == pytest.approx(flops / 1e10)
    assert prefill_floor_s(WORK, fast, 100, 3) == pytest.approx(3 * flops / 1e10)


def test_a_short_prefill_is_bound_by_the_weights() -> None:
    slow = replace(MACHINE, bytes_per_s=1e6)
    nbytes = 2 * WORK.read_weights(4) + 300 + 4 * 7
    assert prefill_floor_s(WORK, slow, 4) == pytest.approx(nbytes / 1e6)


def test_decode_is_bound_by_what_must_move() -> None:
    # One sequence reads the weights that it uses, its state twice and its keys and values.
    assert decode_floor_s(WORK, MACHINE, 1, 10) == pytest.approx((800 + 600 + 70) / 1e9)
    # Of 8 experts of 100 weights each, four sequences choose 5.47 if they choose 2 alike.
    read = 200 + 100 * 8 * (1 - 0.75**4)
    assert decode_floor_s(WORK, MACHINE, 4, 10) == pytest.approx((2 * read + 4 * 670) / 1e9)
    # What was counted is better than what is expected.
    assert decode_floor_s(WORK, MACHINE, 4, 10, touched=3) == pytest.approx((1000 + 4 * 670) / 1e9)


def test_decode_is_bound_by_products_where_memory_is_fast() -> None:
    fast = replace(MACHINE, bytes_per_s=1e20)
    assert decode_floor_s(WORK, fast, 8, 10) == pytest.approx(8 * (2 * 400 + 6 * 10) / 1e10)


def test_no_part_hides_behind_another() -> None:
    """Of 100 rows, products are bound by operations and state by bytes: both take their time."""
    experts = 2 * 100 * 200
    products = (2 * 100 * 180 + 2 * 100 * 20 + experts) / 1e10
    moved = (100 * 600 + 100 * 10 * 7) / 1e9
    assert decode_floor_s(WORK, MACHINE, 100, 10) == pytest.approx(products + moved)


@pytest.mark.parametrize("name", TINY)
def test_one_token_reads_the_weights_that_it_uses(name: str, tmp_path: Path) -> None:
    config, _ = build_tiny(name)
    config.save_pretrained(tmp_path)
    work = count_work(load_model_config(tmp_path))
    assert work.read_weights(1) == pytest.approx(work.num_used_weights)
    assert work.num_used_weights <= work.read_weights(7) <= work.num_weights
    assert work.read_weights(10**6) == pytest.approx(work.num_weights)
    assert work.num_head_weights == 512 * 64


def test_shipped_configs_are_of_the_sizes_in_their_names() -> None:
    """Parameters, without norms and convolutions; the embedding counts twice where it is not
    tied."""
    folder = Path(limits.__file__).parent / "models"
    sizes = {}
    for path in sorted(folder.iterdir()):
        model = load_model_config(path)
        work = count_work(model)
        untied = 0 if model.tie_embeddings else work.num_head_weights
        sizes[path.name] = (work.num_weights + untied) / 1e9
        assert work.num_used_weights < 4.1e9 or path.name == "nemotron-h-8b"
    assert sizes == pytest.approx(
        {
            "hybrid-long": 0.00236,
            "mamba2-220m": 0.2214,
            "nemotron-3-nano-30b": 31.57,
            "nemotron-h-8b": 8.1,
        },
        rel=0.01,
    )
