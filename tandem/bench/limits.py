"""What bounds a step: bytes that must move and operations that must be done, from the model's
shapes.

Counted per token or per sequence; divided by what the machine was measured to do, they give the
floor that every figure is printed beside.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from tandem.config.model import (
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    MixerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    SharedBlockConfig,
)
from tandem.state.spec import build_state_spec
from tandem.units import dtype_nbytes


@dataclass(frozen=True)
class Machine:
    """Ceilings of this machine: bytes per second from memory, bf16 operations per second."""

    bytes_per_s: float
    flops_per_s: float
    threads: int


def measure_machine(threads: int) -> Machine:
    """Ceilings on random data: the best of several reads of 1 GiB and of several bf16 products; of
    the GPU where there is one, by a copy and a larger product.

    The best and not the median: a ceiling that a neighbour lowered would flatter every figure.
    """
    import torch

    if torch.cuda.is_available():
        from tandem.bench.kernels import measure_ceilings

        with torch.inference_mode():
            bytes_per_s, flops_per_s = measure_ceilings()
        torch.cuda.empty_cache()  # gigabytes that the model needs
        return Machine(bytes_per_s, flops_per_s, threads)
    torch.set_num_threads(threads)
    data = torch.randn(1 << 28)  # 1 GiB of fp32, far beyond any cache
    left = torch.randn(1024, 2048).bfloat16()
    right = torch.randn(4096, 2048).bfloat16()
    with torch.inference_mode():
        reads = [_timed(lambda: data.sum()) for _ in range(7)]
        products = [_timed(lambda: torch.nn.functional.linear(left, right)) for _ in range(15)]
    flops = 2.0 * left.shape[0] * left.shape[1] * right.shape[0]
    nbytes = data.numel() * 4.0
    return Machine(nbytes / min(reads), flops / min(products), threads)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def mixer_parameters(mixer: MixerConfig, hidden_size: int) -> int:
    """Matrix weights that one mixer reads: those that its layer declares, but what is fp32 whatever
    the model's dtype, norms and convolutions."""
    import torch

    from tandem.layers.context import LayerContext, RotaryTables
    from tandem.layers.parallel import SingleRank
    from tandem.models.decoder import LAYERS

    if isinstance(mixer, SharedBlockConfig):
        mixer = replace(mixer, owns_weights=True)  # each use reads what it shares
    device = torch.device("cpu")
    context = LayerContext(
        layer=0,
        name=mixer.kind,
        hidden_size=hidden_size,
        dtype=torch.bfloat16,
        device=device,
        tp=SingleRank(),
        rotary=RotaryTables(1, device),
    )
    shapes = [
        weight.shape
        for name, weight in LAYERS[type(mixer)].weights(mixer, context).items()
        if weight.dtype is torch.bfloat16 and "conv" not in name and "norm" not in name
    ]
    return sum(prod(shape) for shape in shapes if len(shape) > 1)


def attention_flops(mixer: MixerConfig) -> int:
    """Of one query with one key: products with the key and with the value, over all heads."""
    if isinstance(mixer, SharedBlockConfig):
        return attention_flops(mixer.attention)
    if isinstance(mixer, AttentionConfig):
        return 4 * mixer.num_heads * mixer.head_dim
    if isinstance(mixer, LatentAttentionConfig):
        return 2 * mixer.num_heads * (2 * mixer.latent_size + mixer.rope_dim)
    return 0


def feed_forward_parameters(item: FeedForwardConfig, hidden_size: int) -> tuple[int, int]:
    """(weights held, weights that one token uses)."""
    if isinstance(item, MlpConfig):
        matrices = 3 if item.activation.endswith("_gated") else 2
        size = matrices * hidden_size * item.intermediate_size
        return size, size
    assert isinstance(item, MoeConfig)
    inner = item.latent_size or hidden_size
    matrices = 3 if item.activation.endswith("_gated") else 2
    expert = matrices * inner * item.intermediate_size
    shared = matrices * hidden_size * item.shared_intermediate_size
    latent = 2 * hidden_size * item.latent_size if item.latent_size else 0
    gates = item.num_experts + (1 if item.has_shared_gate else 0)
    common = shared + latent + hidden_size * gates
    return common + item.num_experts * expert, common + item.top_k * expert


@dataclass(frozen=True)
class ExpertLayer:
    """Routed experts of one layer; `num_weights` of each."""

    num_experts: int
    top_k: int
    num_weights: int

    def expected_touched(self, num_tokens: int) -> float:
        """Experts that at least one token chooses, if all are chosen alike and independently."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)


@dataclass(frozen=True)
class AttentionWork:
    """Attention of all layers that see as many tokens, over all heads.

    nbytes_per_token: keys and values.
    flops: of one query with one key.
    window: tokens that a query sees, itself among them; None: all before it.
    """

    nbytes_per_token: int
    flops: int
    window: int | None = None

    def num_seen(self, context: int) -> int:
        return context if self.window is None else min(context, self.window)

    def num_pairs(self, num_tokens: int) -> float:
        """Of a whole prompt: each query with itself and with what it sees before it."""
        seen = self.num_seen(num_tokens)
        return seen * (seen + 1) / 2 + (num_tokens - seen) * seen


@dataclass(frozen=True)
class Work:
    """Matrix weights (held and used by one token), and bytes of state of one sequence.

    num_head_weights: of all, those that only sampled tokens use.
    """

    num_weights: int
    num_used_weights: int
    weight_nbytes: int
    state_nbytes: int
    num_head_weights: int = 0
    attention: tuple[AttentionWork, ...] = ()
    experts: tuple[ExpertLayer, ...] = ()

    def read_weights(self, num_tokens: int, touched: float | None = None) -> float:
        """Weights that a step of `num_tokens` tokens reads.

        touched: experts that were chosen, on average over the layers; None: as expected of a router
            that spreads evenly.
        """
        routed = sum(layer.num_experts * layer.num_weights for layer in self.experts)
        chosen = sum(
            layer.num_weights * (layer.expected_touched(num_tokens) if touched is None else touched)
            for layer in self.experts
        )
        return self.num_weights - routed + chosen


def count_work(model: ModelConfig) -> Work:
    """Per rank 0 of 1. The embedding is read by row and not counted; the head is."""
    head = model.vocab_size * model.hidden_size
    held = used = head
    spec = build_state_spec(model, tp=1, rank=0, page_tokens=1)
    attention: dict[int | None, AttentionWork] = {}
    experts: list[ExpertLayer] = []
    for index, layer in enumerate(model.layers):
        for mixer in layer.mixers:
            size = mixer_parameters(mixer, model.hidden_size)
            held, used = held + size, used + size
            flops = attention_flops(mixer)
            if flops:
                window = mixer.window if isinstance(mixer, AttentionConfig) else None
                nbytes = sum(item.nbytes for item in spec.page if item.layer == index)
                before = attention.get(window, AttentionWork(0, 0, window))
                attention[window] = AttentionWork(
                    before.nbytes_per_token + nbytes, before.flops + flops, window
                )
        item = layer.feed_forward
        if item is not None:
            all_of, one_of = feed_forward_parameters(item, model.hidden_size)
            held, used = held + all_of, used + one_of
            if isinstance(item, MoeConfig):
                width = item.latent_size or model.hidden_size
                matrices = 3 if item.activation.endswith("_gated") else 2
                size = matrices * width * item.intermediate_size
                experts.append(ExpertLayer(item.num_experts, item.top_k, size))
    return Work(
        num_weights=held,
        num_used_weights=used,
        weight_nbytes=held * dtype_nbytes(model.dtype),
        state_nbytes=spec.slot_nbytes,
        num_head_weights=head,
        attention=tuple(attention.values()),
        experts=tuple(experts),
    )


def prefill_floor_s(work: Work, machine: Machine, num_tokens: int, num_rows: int = 1) -> float:
    """`num_rows` whole prompts of `num_tokens` each: their products, the head's for the last tokens
    alone, causal attention, and all state written."""
    total = num_rows * num_tokens
    attended = [
        (total * item.nbytes_per_token, num_rows * item.num_pairs(num_tokens) * item.flops)
        for item in work.attention
    ]
    return _sum_of_parts(work, machine, total, num_rows, attended=attended, moved_states=num_rows)


def decode_floor_s(
    work: Work, machine: Machine, batch: int, context: int, touched: float | None = None
) -> float:
    """A step's products, attention over `context` tokens, and state read and written.

    touched: see `Work.read_weights`.
    """
    attended = []
    for item in work.attention:
        pairs = batch * item.num_seen(context)
        attended.append((pairs * item.nbytes_per_token, float(pairs * item.flops)))
    return _sum_of_parts(
        work, machine, batch, batch, attended=attended, moved_states=2 * batch, touched=touched
    )


def _sum_of_parts(
    work: Work,
    machine: Machine,
    num_tokens: int,
    num_sampled: int,
    *,
    attended: Sequence[tuple[int, float]],
    moved_states: int,
    touched: float | None = None,
) -> float:
    """Each part of a layer waits for the one before: while products are bound by operations, no
    state moves. So every part takes the longer of its bytes and its operations, and the parts add
    up.

    attended: bytes and operations of attention, one pair for each of `work.attention`.
    """

    def longer(nbytes: float, flops: float) -> float:
        return max(nbytes / machine.bytes_per_s, flops / machine.flops_per_s)

    weight_nbytes = work.weight_nbytes / work.num_weights
    routed = sum(layer.num_experts * layer.num_weights for layer in work.experts)
    chosen = sum(layer.top_k * layer.num_weights for layer in work.experts)
    dense = work.num_weights - routed - work.num_head_weights
    read = work.read_weights(num_tokens, touched) - dense - work.num_head_weights
    return (
        longer(dense * weight_nbytes, 2.0 * dense * num_tokens)
        + longer(work.num_head_weights * weight_nbytes, 2.0 * work.num_head_weights * num_sampled)
        + longer(read * weight_nbytes, 2.0 * chosen * num_tokens)
        + sum(longer(nbytes, flops) for nbytes, flops in attended)
        + longer(moved_states * work.state_nbytes, 0.0)
    )
