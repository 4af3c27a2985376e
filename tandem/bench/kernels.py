"""`tandem bench kernels`: each kernel on a GPU beside its floor, at two models' shapes.

The floor of a case is the longer of two times: the bytes that must move (each input read once, each
output written once) over the measured copy rate, and the operations over the measured rate of a
large product. Inputs are random, the L2 cache is emptied before each launch, and launches are
replayed from a graph, which leaves out the time of the host.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from tandem.errors import ConfigError
from tandem.ops.attention import paged_attention, write_kv
from tandem.ops.conv1d import conv1d_prefill, conv1d_update
from tandem.ops.delta_rule import delta_prefill, delta_update
from tandem.ops.experts import Router, experts_mlp, route
from tandem.ops.linear import PackedLinear
from tandem.ops.linear_attention import linear_attention_prefill, linear_attention_update
from tandem.ops.norm import add_rms_norm, gated_rms_norm
from tandem.ops.norm_gate import norm_gate
from tandem.ops.rg_lru import rg_lru_prefill, rg_lru_update
from tandem.ops.rotary import rotate_and_write
from tandem.ops.sampling import draw
from tandem.ops.selective_scan import selective_scan_prefill, selective_scan_update
from tandem.ops.ssd import ssd_prefill, ssd_update

_DTYPE = torch.bfloat16
_NO_LIMIT = (0.0, float("inf"))


@dataclass(frozen=True)
class Shapes:
    """One model's layers, as far as kernels see them. `experts`: (number, inner size, top k)."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ssm_heads: int
    ssm_head_dim: int
    groups: int
    state_size: int
    num_ssm_layers: int
    num_attention_layers: int
    experts: tuple[int, int, int] | None
    mlp: int  # inner channels of the MLP, or of the shared expert
    vocab: int

    @property
    def inner(self) -> int:
        return self.ssm_heads * self.ssm_head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.groups * self.state_size


NANO = Shapes("nano", 2688, 32, 2, 128, 64, 64, 8, 128, 23, 6, (128, 1856, 6), 3712, 131072)
NEMOTRON_8B = Shapes("8b", 4096, 32, 8, 128, 128, 64, 8, 128, 24, 4, None, 21504, 131072)


@dataclass(frozen=True)
class Case:
    """`build` makes the inputs and returns the launch; bytes and operations are those it needs."""

    name: str
    build: Callable[[], Callable[[], object]]
    nbytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Result:
    name: str
    us: float
    floor_us: float
    is_bound_by_bytes: bool

    @property
    def share(self) -> float:
        return self.floor_us / self.us


def _randn(*shape: int, dtype: torch.dtype = _DTYPE) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _slots(count: int) -> torch.Tensor:
    return torch.randperm(count, device="cuda")


def _starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


def _strided(rows: int, gap: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """`rows` parts in an arena in which the other layers' parts lie between them."""
    numel = torch.Size(shape).numel()
    buffer = torch.empty(rows * gap * numel, device="cuda", dtype=dtype)
    strides = [torch.Size(shape[axis + 1 :]).numel() for axis in range(len(shape))]
    view = buffer.as_strided((rows, *shape), (gap * numel, *strides))
    view.normal_()
    return view


def _ssm_inputs(shapes: Shapes, num_tokens: int) -> tuple:
    """x, dt, A, B, C, D and dt_bias; x, B, C and dt are slices, as their producers leave them."""
    width = shapes.groups * shapes.state_size
    channels = _randn(num_tokens, shapes.conv_channels)
    x, B, C = channels.split([shapes.inner, width, width], dim=1)
    per_group = (shapes.groups, shapes.state_size)
    dt = _randn(num_tokens, shapes.inner + shapes.conv_channels + shapes.ssm_heads)
    fp32 = torch.float32
    A, D, bias = (_randn(shapes.ssm_heads, dtype=fp32) for _ in range(3))
    return (
        x.unflatten(1, (shapes.ssm_heads, shapes.ssm_head_dim)),
        dt[:, -shapes.ssm_heads :],
        -A.exp(),
        B.unflatten(1, per_group),
        C.unflatten(1, per_group),
        D,
        bias,
    )


def ssd_update_case(shapes: Shapes, rows: int, dtype: torch.dtype = torch.float32) -> Case:
    def build() -> Callable[[], object]:
        x, dt, A, B, C, D, bias = _ssm_inputs(shapes, rows)
        shape = (shapes.ssm_heads, shapes.ssm_head_dim, shapes.state_size)
        state, slots = _strided(max(rows, 8), shapes.num_ssm_layers, shape, dtype), _slots(rows)
        return lambda: ssd_update(x, dt, A, B, C, D, state, slots, bias, _NO_LIMIT)

    per_row = 2 * shapes.inner * shapes.state_size * dtype.itemsize
    per_row += 2 * (shapes.conv_channels + shapes.inner)
    kind = "" if dtype is torch.float32 else ", bf16 state"
    return Case(f"{shapes.name} ssd_update {rows}{kind}", build, rows * per_row)


def ssd_prefill_case(shapes: Shapes, lengths: list[int]) -> Case:
    num_tokens, rows = sum(lengths), len(lengths)

    def build() -> Callable[[], object]:
        x, dt, A, B, C, D, bias = _ssm_inputs(shapes, num_tokens)
        shape = (shapes.ssm_heads, shapes.ssm_head_dim, shapes.state_size)
        state = _strided(rows, shapes.num_ssm_layers, shape, torch.float32)
        rest = (_slots(rows), _starts(lengths), torch.ones(rows, dtype=torch.bool, device="cuda"))
        return lambda: ssd_prefill(x, dt, A, B, C, D, state, *rest, bias, _NO_LIMIT)

    nbytes = num_tokens * 2 * (shapes.conv_channels + shapes.inner + shapes.ssm_heads)
    nbytes += rows * 2 * shapes.inner * shapes.state_size * 4
    # In chunks of 64 tokens, the scores once a group.
    flops = shapes.groups * 2 * 64 * shapes.state_size
    flops += shapes.inner * (2 * 64 + 4 * shapes.state_size)
    return Case(
        f"{shapes.name} ssd_prefill {rows} x {lengths[0]}", build, nbytes, num_tokens * flops
    )


# Channels and state size of the Mamba-1 layers of Jamba and FalconMamba.
_MAMBA1 = (8192, 16)


def _mamba1_inputs(num_tokens: int) -> tuple:
    """x, dt, A, B, C, D, z and dt_bias; z, B and C are slices, as their producers leave them."""
    channels, size = _MAMBA1
    B, C = _randn(num_tokens, 1, 256 + 2 * size)[..., 256:].chunk(2, dim=-1)
    A = -_randn(channels, size, dtype=torch.float32).exp()
    D, bias = _randn(2, channels, dtype=torch.float32)
    x, dt = _randn(2, num_tokens, channels)
    return x, dt, A, B, C, D, _randn(num_tokens, 2 * channels)[:, channels:], bias


def selective_scan_update_case(rows: int, dtype: torch.dtype = torch.float32) -> Case:
    def build() -> Callable[[], object]:
        x, dt, A, B, C, D, z, bias = _mamba1_inputs(rows)
        state, slots = _strided(max(rows, 8), 32, _MAMBA1, dtype), _slots(rows)
        return lambda: selective_scan_update(x, dt, A, B, C, D, z, state, slots, bias)

    channels, size = _MAMBA1
    kind = "" if dtype is torch.float32 else ", bf16 state"
    nbytes = rows * channels * (2 * size * dtype.itemsize + 8) + channels * size * 4
    return Case(f"mamba1 selective_scan_update {rows}{kind}", build, nbytes)


def selective_scan_prefill_case(lengths: list[int]) -> Case:
    num_tokens, rows = sum(lengths), len(lengths)

    def build() -> Callable[[], object]:
        x, dt, A, B, C, D, z, bias = _mamba1_inputs(num_tokens)
        state = _strided(rows, 32, _MAMBA1, torch.float32)
        rest = (_slots(rows), _starts(lengths), torch.ones(rows, dtype=torch.bool, device="cuda"))
        return lambda: selective_scan_prefill(x, dt, A, B, C, D, z, state, *rest, bias)

    channels, size = _MAMBA1
    nbytes = channels * (8 * num_tokens + 8 * size * rows)
    return Case(f"mamba1 selective_scan_prefill {rows} x {lengths[0]}", build, nbytes)


# Heads of the delta rules of Qwen3-Next (a decay each, 16 key heads) and of Kimi-Linear (a decay of
# each key channel), all of 128 x 128; heads of MiniMax-Text-01; blocks of RecurrentGemma-9B.
_DELTA_HEADS = 32
_DELTA_DIM = 128
_LIGHTNING = (64, 128)
_RG_LRU = (16, 256)


def _row_arguments(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """slots, query_start and has_state of prompts that go on."""
    rows = len(lengths)
    return _slots(rows), _starts(lengths), torch.ones(rows, dtype=torch.bool, device="cuda")


def _is_decode(lengths: list[int]) -> bool:
    return max(lengths) == 1


def _case_name(op: str, lengths: list[int], dtype: torch.dtype = torch.float32) -> str:
    if not _is_decode(lengths):
        return f"{op}_prefill {len(lengths)} x {lengths[0]}"
    return f"{op}_update {len(lengths)}" + ("" if dtype is torch.float32 else ", bf16 state")


def delta_case(lengths: list[int], by_channel: bool, dtype: torch.dtype = torch.float32) -> Case:
    """Rows of one token each are a decode step."""
    num_tokens, heads, dim = sum(lengths), _DELTA_HEADS, _DELTA_DIM
    key_heads = heads if by_channel else heads // 2
    inner = (heads, dim) if by_channel else (heads,)
    widths = [key_heads * dim, key_heads * dim, heads * dim]

    def build() -> Callable[[], object]:
        q, k, v = _randn(num_tokens, sum(widths)).split(widths, dim=1)
        q, k, v = (x.unflatten(1, (-1, dim)) for x in (q, k, v))
        a, b = _randn(num_tokens, *inner), _randn(num_tokens, heads)
        A, bias = -_randn(heads, dtype=torch.float32).exp(), _randn(*inner, dtype=torch.float32) - 2
        state = _strided(max(len(lengths), 8), 4, (heads, dim, dim), dtype)
        values = (q, k, v, a, b, A, bias, state)
        if _is_decode(lengths):
            slots = _slots(num_tokens)
            return lambda: delta_update(*values, slots)
        rows = _row_arguments(lengths)
        return lambda: delta_prefill(*values, *rows)

    nbytes = 2 * num_tokens * (sum(widths) + heads * dim + (heads * dim if by_channel else heads))
    nbytes += 2 * len(lengths) * heads * dim * dim * dtype.itemsize
    name = "kimi delta" if by_channel else "gated delta"
    return Case(_case_name(name, lengths, dtype), build, nbytes)


def linear_attention_case(lengths: list[int]) -> Case:
    num_tokens, (heads, dim) = sum(lengths), _LIGHTNING

    def build() -> Callable[[], object]:
        q, k, v = _randn(num_tokens, heads, 3 * dim).split(dim, dim=-1)
        A = -torch.rand(heads, device="cuda")
        state = _strided(max(len(lengths), 8), 2, (heads, dim, dim), torch.float32)
        if _is_decode(lengths):
            slots = _slots(num_tokens)
            return lambda: linear_attention_update(q, k, v, A, state, slots)
        rows = _row_arguments(lengths)
        return lambda: linear_attention_prefill(q, k, v, A, state, *rows)

    nbytes = 8 * num_tokens * heads * dim + 8 * len(lengths) * heads * dim * dim
    return Case(_case_name("linear_attention", lengths), build, nbytes)


def rg_lru_case(lengths: list[int]) -> Case:
    num_tokens, (blocks, width) = sum(lengths), _RG_LRU

    def build() -> Callable[[], object]:
        x = _randn(num_tokens, blocks, width)
        joined = _randn(blocks, num_tokens, 2 * width).transpose(0, 1)
        opened, decay = joined.split(width, dim=-1)
        A = -8 * torch.rand(blocks, width, device="cuda")
        state = _strided(max(len(lengths), 8), 4, (blocks, width), torch.float32)
        if _is_decode(lengths):
            slots = _slots(num_tokens)
            return lambda: rg_lru_update(x, opened, decay, A, state, slots)
        rows = _row_arguments(lengths)
        return lambda: rg_lru_prefill(x, opened, decay, A, state, *rows)

    nbytes = 8 * (num_tokens + len(lengths)) * blocks * width
    return Case(_case_name("rg_lru", lengths), build, nbytes)


def norm_gate_case(num_tokens: int) -> Case:
    width = _DELTA_HEADS * _DELTA_DIM

    def build() -> Callable[[], object]:
        y, gate = _randn(2, num_tokens, width)
        weight = _randn(_DELTA_DIM)
        return lambda: norm_gate(y, gate, weight, 1e-6, _DELTA_DIM, "silu")

    return Case(f"gated delta norm_gate {num_tokens}", build, 6 * num_tokens * width)


def recurrent_cases() -> Iterator[Case]:
    """The kinds of state beside Mamba's."""
    for by_channel in (False, True):
        for rows in (1, 8, 64, 256):
            yield delta_case([1] * rows, by_channel)
        for lengths in ([1024], [8192], [8192] * 8):
            yield delta_case(lengths, by_channel)
    yield delta_case([1] * 256, False, _DTYPE)
    for lengths in ([1] * 64, [1024], [8192]):
        yield linear_attention_case(lengths)
    for lengths in ([1], [1] * 256, [1024], [8192], [8192] * 4):
        yield rg_lru_case(lengths)
    for num_tokens in (1, 256, 8192):
        yield norm_gate_case(num_tokens)


def conv1d_case(shapes: Shapes, lengths: list[int], is_update: bool) -> Case:
    num_tokens, rows, channels = sum(lengths), len(lengths), shapes.conv_channels

    def build() -> Callable[[], object]:
        x = _randn(num_tokens, shapes.inner + channels + shapes.ssm_heads)
        x = x[:, shapes.inner : shapes.inner + channels]
        weight, bias = _randn(channels, 4), _randn(channels)
        width = shapes.groups * shapes.state_size
        windows = [
            _strided(rows, shapes.num_ssm_layers, (part, 3), _DTYPE)
            for part in (shapes.inner, width, width)
        ]
        slots = _slots(rows)
        if is_update:
            return lambda: conv1d_update(x, weight, bias, windows, slots)
        rest = (slots, _starts(lengths), torch.ones(rows, dtype=torch.bool, device="cuda"))
        return lambda: conv1d_prefill(x, weight, bias, windows, *rest)

    nbytes = 2 * channels * (2 * num_tokens + 6 * rows)
    name = f"conv1d_update {rows}" if is_update else f"conv1d_prefill {rows} x {lengths[0]}"
    return Case(f"{shapes.name} {name}", build, nbytes)


def _paged(shapes: Shapes, contexts: list[int], page_tokens: int) -> tuple:
    pages_each = [-(-context // page_tokens) for context in contexts]
    shape = (shapes.kv_heads, 2, page_tokens, shapes.head_dim)
    kv = _strided(sum(pages_each), shapes.num_attention_layers, shape, _DTYPE)
    order = torch.randperm(sum(pages_each)).int()
    table = torch.zeros(len(contexts), max(pages_each), dtype=torch.int32)
    for row, pages in enumerate(order.split(pages_each)):
        table[row, : len(pages)] = pages
    return kv, table.cuda(), torch.tensor(contexts, dtype=torch.int32, device="cuda")


def attention_decode_case(shapes: Shapes, rows: int, context: int, page_tokens: int) -> Case:
    def build() -> Callable[[], object]:
        kv, table, contexts = _paged(shapes, [context] * rows, page_tokens)
        q, starts = _randn(rows, shapes.heads, shapes.head_dim), _starts([1] * rows)
        scale = shapes.head_dim**-0.5
        return lambda: paged_attention(q, kv, table, starts, contexts, scale, rows)

    name = f"{shapes.name} attention decode {rows} x {context}, pages of {page_tokens}"
    return Case(name, build, rows * context * shapes.kv_heads * 2 * shapes.head_dim * 2)


def attention_prefill_case(shapes: Shapes, rows: int, length: int, page_tokens: int) -> Case:
    def build() -> Callable[[], object]:
        kv, table, contexts = _paged(shapes, [length] * rows, page_tokens)
        q = _randn(rows * length, shapes.heads, shapes.head_dim)
        starts, scale = _starts([length] * rows), shapes.head_dim**-0.5
        return lambda: paged_attention(q, kv, table, starts, contexts, scale, 0)

    flops = rows * 2.0 * length * length * shapes.heads * shapes.head_dim
    nbytes = rows * length * 2 * shapes.head_dim * (2 * shapes.heads + 2 * shapes.kv_heads)
    name = f"{shapes.name} attention prefill {rows} x {length}, pages of {page_tokens}"
    return Case(name, build, nbytes, flops)


def write_kv_case(shapes: Shapes, num_tokens: int) -> Case:
    def build() -> Callable[[], object]:
        kv, table, _ = _paged(shapes, [num_tokens], 16)
        k, v = _randn(2, num_tokens, shapes.kv_heads, shapes.head_dim)
        at = torch.arange(num_tokens, device="cuda")
        pages, offsets = table[0, at // 16].long(), at % 16
        return lambda: write_kv(k, v, kv, pages, offsets)

    nbytes = num_tokens * shapes.kv_heads * shapes.head_dim * 8
    return Case(f"{shapes.name} write_kv {num_tokens}", build, nbytes)


def rotary_case(shapes: Shapes, num_tokens: int) -> Case:
    """Queries and keys turned, keys and values written to their pages."""
    heads, kv_heads, head_dim = shapes.heads, shapes.kv_heads, shapes.head_dim

    def build() -> Callable[[], object]:
        kv, table, _ = _paged(shapes, [num_tokens], 16)
        of_all = _randn(num_tokens, heads + 2 * kv_heads, head_dim)
        q, k, v = of_all.split([heads, kv_heads, kv_heads], dim=1)
        at = torch.arange(num_tokens, device="cuda")
        where = (kv, table[0, at // 16].long(), at % 16)
        cos, sin = torch.rand(2, num_tokens, head_dim // 2, device="cuda")
        return lambda: rotate_and_write(q, k, v, at, cos, sin, head_dim, *where)

    nbytes = num_tokens * head_dim * 4 * (heads + 2 * kv_heads + 1)
    return Case(f"{shapes.name} rotary and write_kv {num_tokens}", build, nbytes)


def draw_case(rows: int, vocab: int, cut: str) -> Case:
    """Logits with a standard deviation of 4: of a temperature of 0.8, top-p 0.95 keeps hundreds."""

    def build() -> Callable[[], object]:
        logits = 4 * _randn(rows, vocab, dtype=torch.float32)
        own = torch.arange(rows, device="cuda")
        temperature = torch.full((rows,), 0.8, device="cuda")
        uniform = torch.rand(rows, dtype=torch.float64, device="cuda")
        top_k = torch.full((rows,), 50 if cut == "top-k" else vocab, device="cuda")
        top_p = torch.full((rows,), 0.95 if cut == "top-p" else 2.0, device="cuda").double()
        min_p = torch.zeros(rows, device="cuda")
        short, long = own if cut == "top-k" else None, own if cut == "top-p" else None
        columns = (temperature, uniform, top_k, top_p, min_p)
        return lambda: draw(logits, own, *columns, 50, short, long)

    return Case(f"draw {rows} x {vocab}, {cut}", build, rows * vocab * 4)


def linear_case(name: str, num_outputs: int, num_inputs: int, rows: int) -> Case:
    """Equal layers that lie apart, one after the other: none is in a cache when its turn comes."""

    def build() -> Callable[[], object]:
        x = _randn(rows, num_inputs)
        weight = _randn(num_outputs, num_inputs).mul_(num_inputs**-0.5)
        copies = max(2, -(-_ROTATED_NBYTES // (weight.numel() * 2)))
        layers = itertools.cycle([PackedLinear(weight.clone()) for _ in range(copies)])
        return lambda: next(layers)(x)

    nbytes = 2 * (num_outputs * num_inputs + rows * (num_inputs + num_outputs))
    return Case(f"{name} {rows}", build, nbytes, 2.0 * rows * num_outputs * num_inputs)


def linear_layers(shapes: Shapes) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of a model's projections, by name."""
    width = shapes.heads * shapes.head_dim
    layers = {
        "in_proj": (shapes.inner + shapes.conv_channels + shapes.ssm_heads, shapes.hidden),
        "out_proj": (shapes.hidden, shapes.inner),
        "qkv": (width + 2 * shapes.kv_heads * shapes.head_dim, shapes.hidden),
        "o_proj": (shapes.hidden, width),
        "up_proj": (shapes.mlp, shapes.hidden),
        "down_proj": (shapes.hidden, shapes.mlp),
        "lm_head": (shapes.vocab, shapes.hidden),
    }
    return {f"{shapes.name} {name}": size for name, size in layers.items()}


def norm_case(shapes: Shapes, num_tokens: int) -> Case:
    def build() -> Callable[[], object]:
        x, residual = _randn(2, num_tokens, shapes.hidden)
        weight = _randn(shapes.hidden)
        return lambda: add_rms_norm(x, residual, weight, 1e-5)

    nbytes = num_tokens * shapes.hidden * 8
    return Case(f"{shapes.name} add_rms_norm {num_tokens}", build, nbytes)


def gated_norm_case(shapes: Shapes, num_tokens: int) -> Case:
    def build() -> Callable[[], object]:
        y, weight = _randn(num_tokens, shapes.inner), _randn(shapes.inner)
        gate = _randn(num_tokens, shapes.inner + shapes.conv_channels)[:, : shapes.inner]
        size = shapes.inner // shapes.groups
        return lambda: gated_rms_norm(y, gate, weight, 1e-5, size)

    nbytes = num_tokens * shapes.inner * 6
    return Case(f"{shapes.name} gated_rms_norm {num_tokens}", build, nbytes)


def routing_case(shapes: Shapes, num_tokens: int) -> Case:
    assert shapes.experts is not None
    num_experts, _, top_k = shapes.experts

    def build() -> Callable[[], object]:
        logits, bias = _randn(num_tokens, num_experts).float(), _randn(num_experts).float()
        return lambda: route(logits, bias, top_k, 1, 1, True, 2.5)

    nbytes = num_tokens * (num_experts * 4 + top_k * 12)
    return Case(f"{shapes.name} route {num_tokens}", build, nbytes)


def router_case(shapes: Shapes, num_tokens: int) -> Case:
    """Product with the gate in fp32, and the choice."""
    assert shapes.experts is not None
    num_experts, _, top_k = shapes.experts

    def build() -> Callable[[], object]:
        x, gate = _randn(num_tokens, shapes.hidden), _randn(num_experts, shapes.hidden).float()
        bias = _randn(num_experts).float()
        router = Router(gate.mul_(0.02), bias, top_k, 1, 1, True, 2.5)
        return lambda: router(x)

    nbytes = num_tokens * (shapes.hidden * 2 + top_k * 12) + num_experts * shapes.hidden * 4
    flops = 3 * 2.0 * num_tokens * num_experts * shapes.hidden  # as bf16 products
    return Case(f"{shapes.name} router {num_tokens}", build, nbytes, flops)


def experts_case(shapes: Shapes, num_tokens: int) -> Case:
    """Tokens choose evenly at random; the bytes are those of the experts that were chosen."""
    assert shapes.experts is not None
    num_experts, inner, top_k = shapes.experts
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices
    matrix = shapes.hidden * inner

    def build() -> Callable[[], object]:
        x = _randn(num_tokens, shapes.hidden)
        up = _randn(num_experts, inner, shapes.hidden).mul_(0.02)
        down = _randn(num_experts, shapes.hidden, inner).mul_(0.02)
        weights = torch.rand(num_tokens, top_k, device="cuda")
        chosen = ids.cuda()
        return lambda: experts_mlp(x, up, down, weights, chosen, "relu2")

    nbytes = len(ids.unique()) * 2 * matrix * 2 + num_tokens * shapes.hidden * 4
    return Case(
        f"{shapes.name} experts {num_tokens}", build, nbytes, num_tokens * top_k * 4.0 * matrix
    )


def cases() -> Iterator[Case]:
    """Every case that the notes list."""
    for shapes in (NANO, NEMOTRON_8B):
        for name, size in linear_layers(shapes).items():
            for rows in (1, 8, 32, 64):
                yield linear_case(name, *size, rows)
    for rows in (1, 8, 64, 256):
        yield ssd_update_case(NANO, rows)
    yield ssd_update_case(NANO, 256, _DTYPE)
    yield ssd_update_case(NEMOTRON_8B, 256)
    for lengths in ([1024], [8192], [8192] * 16):
        yield ssd_prefill_case(NANO, lengths)
    yield ssd_prefill_case(NEMOTRON_8B, [8192])
    for rows in (1, 64, 256):
        yield selective_scan_update_case(rows)
    yield selective_scan_update_case(256, _DTYPE)
    for lengths in ([1024], [8192], [8192] * 16):
        yield selective_scan_prefill_case(lengths)
    yield from recurrent_cases()
    for rows in (1, 256):
        yield conv1d_case(NANO, [1] * rows, is_update=True)
    for lengths in ([1024], [8192] * 4):
        yield conv1d_case(NANO, lengths, is_update=False)
    for rows, context, page_tokens in (
        (1, 640, 16),
        (256, 640, 16),
        (256, 640, 64),
        (1, 32768, 16),
    ):
        yield attention_decode_case(NANO, rows, context, page_tokens)
    yield attention_decode_case(NEMOTRON_8B, 256, 640, 16)
    for rows, length, page_tokens in ((1, 1024, 16), (1, 8192, 16), (1, 8192, 64), (16, 8192, 64)):
        yield attention_prefill_case(NANO, rows, length, page_tokens)
    yield write_kv_case(NANO, 8192)
    for num_tokens in (1, 256, 8192):
        yield rotary_case(NEMOTRON_8B, num_tokens)
    for rows in (1, 256):
        for cut in ("no cut", "top-k", "top-p"):
            yield draw_case(rows, 131072, cut)
    for num_tokens in (1, 256, 8192):
        yield norm_case(NANO, num_tokens)
        yield gated_norm_case(NANO, num_tokens)
    for num_tokens in (256, 8192):
        yield routing_case(NANO, num_tokens)
        yield router_case(NANO, num_tokens)
    for num_tokens in (1, 8, 32, 64, 256, 1024, 8192):
        yield experts_case(NANO, num_tokens)


# Larger than the L2 cache of any card: what is read here drives all else out of it. Were it
# written, the launch that is timed would have to wait until those lines are back in memory.
_FLUSH_NBYTES = 192 << 20
_LAUNCHES = 10
_REPLAYS = 9
# Several times the L2 cache of any card.
_ROTATED_NBYTES = 192 << 20


def median_us(launch: Callable[[], object]) -> float:
    """Time of one launch behind an emptied cache, without that of the host.

    Two graphs, one of flushes and one of flushes with a launch behind each; the median difference
    over replays. So it also shows that the launch can be captured.
    """
    rest = torch.randn(_FLUSH_NBYTES // 4, device="cuda")
    total = torch.empty((), device="cuda")

    def flush() -> object:
        return torch.sum(rest, dim=0, out=total)

    for _ in range(2):  # compiles, and settles which memory is used
        launch()
    torch.cuda.synchronize()
    with_launch = _capture(lambda: (flush(), launch()))
    without = _capture(flush)
    differences = sorted(_replay_us(with_launch) - _replay_us(without) for _ in range(_REPLAYS))
    return differences[_REPLAYS // 2] / _LAUNCHES


def chain_us(launch: Callable[[], object]) -> float:
    """Time of one launch among others like it, each behind the one before: what it takes in a step,
    where kernels overlap. The launches themselves must see to it that no cache helps.
    """
    for _ in range(2):
        launch()
    torch.cuda.synchronize()
    graph = _capture(launch)
    return sorted(_replay_us(graph) for _ in range(_REPLAYS))[_REPLAYS // 2] / _LAUNCHES


def _capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            work()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(stop)


def measure_ceilings() -> tuple[float, float]:
    """(bytes per second of a large copy, read and written; operations per second of a product).

    The copy negates: a plain one would be a memory node of the graph, which is slower.
    """
    source, target = torch.randn(2, 1 << 29, device="cuda")
    a, b = _randn(2, 8192, 8192)
    copied = 2 * source.numel() * source.element_size()
    return (
        copied / (median_us(lambda: torch.neg(source, out=target)) * 1e-6),
        2 * 8192.0**3 / (median_us(lambda: a @ b) * 1e-6),
    )


def require_gpu() -> None:
    """Raises: ConfigError where there is no GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("kernels are measured on a GPU; no CUDA device is present here")


@torch.inference_mode()
def run(name_contains: str = "") -> dict:
    """Time the cases whose name contains `name_contains`; figures and the card they are of."""
    bytes_per_s, flops_per_s = measure_ceilings()
    results = []
    for case in cases():
        if name_contains not in case.name:
            continue
        us = median_us(case.build())
        by_bytes, by_flops = case.nbytes / bytes_per_s * 1e6, case.flops / flops_per_s * 1e6
        results.append(Result(case.name, us, max(by_bytes, by_flops), by_bytes >= by_flops))
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "gbytes_per_s": bytes_per_s / 1e9,
        "tflops_per_s": flops_per_s / 1e12,
        "results": [{**asdict(result), "share_of_floor": result.share} for result in results],
    }


def render(report: dict, console: Console) -> None:
    """The report as a table."""
    table = Table(
        title=f"{report['device']}, copy {report['gbytes_per_s']:.0f} GB/s, "
        f"product {report['tflops_per_s']:.0f} TFLOP/s"
    )
    for heading in ("", "us", "floor us", "bound by", "floor / time"):
        table.add_column(heading, justify="right" if heading else "left")
    for result in report["results"]:
        table.add_row(
            result["name"],
            f"{result['us']:.1f}",
            f"{result['floor_us']:.1f}",
            "bytes" if result["is_bound_by_bytes"] else "operations",
            f"{result['share_of_floor']:.0%}",
        )
    console.print(table)
