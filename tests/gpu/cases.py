"""Random problems of each op on any device, and their comparison with the reference.

Used on a GPU by the tests beside it, and in small on the Triton interpreter by tests/unit/ops. The
reference gets the same values in fp32, so that what is compared is the kernel's rounding alone.
Outputs come from memory that was just filled with NaN; pages and slots hold NaN at first.
"""

from collections.abc import Callable
from types import ModuleType

import torch

from tandem.ops.activation import reference as activation_reference
from tandem.ops.attention import reference as attention_reference
from tandem.ops.conv1d import reference as conv1d_reference
from tandem.ops.delta_rule import reference as delta_reference
from tandem.ops.experts import reference as experts_reference
from tandem.ops.latent_attention import reference as latent_reference
from tandem.ops.norm import reference as norm_reference
from tandem.ops.norm_gate import reference as norm_gate_reference
from tandem.ops.rg_lru import reference as rg_lru_reference
from tandem.ops.rotary import reference as rotary_reference
from tandem.ops.rounding import Rounding, round_state
from tandem.ops.sampling import reference as sampling_reference
from tandem.ops.ssd import reference as ssd_reference
from tests.tolerances import assert_close
from tests.unit.ops.arena import GarbageArena

NO_LIMIT = (0.0, float("inf"))


class Random:
    """Random tensors on one device from one seed."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = torch.randn(*shape, generator=self._generator, device=self.device)
        return values.to(dtype)

    def starts(self, lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths], device=self.device).cumsum(0).to(torch.int32)

    def index(self, values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def poison(numel: int, device: str) -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    if numel:
        torch.full((numel,), torch.nan, device=device)


def arena(rng: Random, num_rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> GarbageArena:
    with torch.device(rng.device):
        return GarbageArena(num_rows, shape, dtype)


def check_ssd_prefill(
    module: ModuleType,
    device: str,
    lengths: list[int],
    has_state: list[bool],
    *,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    heads: int = 4,
    groups: int = 2,
    head_dim: int = 64,
    state_size: int = 128,
    limit: tuple[float, float] = NO_LIMIT,
    has_skip: bool = True,
    is_random: bool = False,
    gap: int = 3,
) -> None:
    """gap: elements in front of each row; tiles in hardware need them to keep 16 bytes."""
    rng = Random(device)
    num_tokens, rows = sum(lengths), len(lengths)
    widths = [heads * head_dim, groups * state_size, groups * state_size]
    x, B, C = rng.normal(num_tokens, sum(widths) + gap, dtype=dtype)[:, gap:].split(widths, dim=1)
    x, B, C = (
        x.unflatten(1, (heads, head_dim)),
        B.unflatten(1, (groups, state_size)),
        C.unflatten(1, (groups, state_size)),
    )
    dt = (rng.normal(num_tokens, heads + 5) - 2).to(dtype)[:, 5:]
    A, bias = -torch.exp(rng.normal(heads)), rng.normal(heads)
    D = rng.normal(heads) if has_skip else None
    slots = [2 * row + 1 for row in range(rows)][::-1]
    states = arena(rng, 2 * rows + 1, (heads, head_dim, state_size), state_dtype)
    for slot, is_live in zip(slots, has_state, strict=True):
        if is_live:
            states.fill(slot, rng.normal(heads, head_dim, state_size))
    rest = (rng.index(slots), rng.starts(lengths), torch.tensor(has_state, device=device))
    expected_state = states.view.float().clone()
    expected = ssd_reference.ssd_prefill(
        x.float(), dt, A, B.float(), C.float(), D, expected_state, *rest, bias, limit
    )
    poison(x.numel(), device)
    rounding = Rounding(7, rng.index([100 + 3 * row for row in range(rows)])) if is_random else None
    y = module.ssd_prefill(x, dt, A, B, C, D, states.view, *rest, bias, limit, rounding=rounding)

    assert y.dtype == dtype
    assert_close(y, expected)
    touched = [slot for slot, length in zip(slots, lengths, strict=True) if length]
    states.assert_only_changed(touched)
    # The state is a sum of products of operands in x.dtype.
    assert_close(states.view[touched], expected_state[touched], coarser(dtype, state_dtype))


def check_ssd_update(
    module: ModuleType,
    device: str,
    rows: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    heads: int = 4,
    groups: int = 2,
    head_dim: int = 64,
    state_size: int = 128,
    limit: tuple[float, float] = (0.01, 2.0),
    is_random: bool = False,
) -> None:
    rng = Random(device)
    x = rng.normal(rows, heads * head_dim + 3, dtype=dtype)[:, 3:].unflatten(1, (heads, head_dim))
    B, C = rng.normal(2, rows, groups, state_size, dtype=dtype)
    dt = rng.normal(rows, heads + 5, dtype=dtype)[:, 5:]
    A, bias, D = -torch.exp(rng.normal(heads)), rng.normal(heads), rng.normal(heads)
    slots = [2 * row + 1 for row in range(rows)][::-1]
    states = arena(rng, 2 * rows + 1, (heads, head_dim, state_size), state_dtype)
    for slot in slots:
        states.fill(slot, rng.normal(heads, head_dim, state_size))
    expected_state = states.view.float().clone()
    expected = ssd_reference.ssd_update(
        x.float(), dt, A, B.float(), C.float(), D, expected_state, rng.index(slots), bias, limit
    )
    poison(x.numel(), device)
    rounding = Rounding(7, rng.index([100 + 3 * row for row in range(rows)])) if is_random else None
    rest = (states.view, rng.index(slots), bias, limit, rounding)
    y = module.ssd_update(x, dt, A, B, C, D, *rest)

    assert y.dtype == dtype
    assert_close(y, expected)
    states.assert_only_changed(slots)
    assert_close(states.view[slots], expected_state[slots], state_dtype)


def _delta_values(
    rng: Random, num_tokens: int, heads: int, groups: int, key: int, value: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """q, k and v as slices of one tensor."""
    widths = [groups * key, groups * key, heads * value]
    parts = rng.normal(num_tokens, sum(widths) + 3, dtype=dtype)[:, 3:].split(widths, dim=1)
    shapes = [(groups, key), (groups, key), (heads, value)]
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def _delta_gates(
    rng: Random,
    num_tokens: int,
    heads: int,
    key: int,
    dtype: torch.dtype,
    by_channel: bool,
    rate: float = 1.0,
) -> list[torch.Tensor]:
    """a, b, A and dt_bias; decays of every size, about `rate` times e^-2 to 1."""
    inner = (heads, key) if by_channel else (heads,)
    a = (2 * rng.normal(num_tokens, torch.Size(inner).numel() + 5)).to(dtype)[:, 5:]
    b = rng.normal(num_tokens, heads + 5, dtype=dtype)[:, 5:]
    A = -rate * torch.exp(rng.normal(heads))
    return [a.unflatten(1, inner), b, A, rng.normal(*inner) - 2]


def check_delta_prefill(
    module: ModuleType,
    device: str,
    lengths: list[int],
    has_state: list[bool],
    *,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    heads: int = 4,
    groups: int = 2,
    key: int = 128,
    value: int = 128,
    by_channel: bool = False,
    max_beta: float = 1.0,
    floor: float | None = None,
    rate: float = 1.0,
    is_random: bool = False,
) -> None:
    rng = Random(device)
    num_tokens, rows = sum(lengths), len(lengths)
    q, k, v = _delta_values(rng, num_tokens, heads, groups, key, value, dtype)
    gates = _delta_gates(rng, num_tokens, heads, key, dtype, by_channel, rate)
    slots = [2 * row + 1 for row in range(rows)][::-1]
    states = arena(rng, 2 * rows + 1, (heads, value, key), state_dtype)
    for slot, is_live in zip(slots, has_state, strict=True):
        if is_live:
            states.fill(slot, rng.normal(heads, value, key))
    live = torch.tensor(has_state, device=device)
    rest = (rng.index(slots), rng.starts(lengths), live, max_beta, floor)
    expected_state = states.view.float().clone()
    expected = delta_reference.delta_prefill(
        q.float(), k.float(), v.float(), *gates, expected_state, *rest
    )
    rounding = Rounding(7, rng.index([100 + 3 * row for row in range(rows)])) if is_random else None
    poison(2 * v.numel(), device)
    o = module.delta_prefill(q, k, v, *gates, states.view, *rest, rounding=rounding)

    assert o.dtype == dtype
    assert_close(o, expected)
    touched = [slot for slot, length in zip(slots, lengths, strict=True) if length]
    states.assert_only_changed(touched)
    # The state is a sum of products of operands in the dtype of v.
    assert_close(states.view[touched], expected_state[touched], coarser(dtype, state_dtype))


def check_delta_update(
    module: ModuleType,
    device: str,
    rows: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    heads: int = 4,
    groups: int = 2,
    key: int = 128,
    value: int = 128,
    by_channel: bool = False,
    max_beta: float = 2.0,
    floor: float | None = None,
    is_random: bool = False,
) -> None:
    rng = Random(device)
    q, k, v = _delta_values(rng, rows, heads, groups, key, value, dtype)
    gates = _delta_gates(rng, rows, heads, key, dtype, by_channel)
    slots = [2 * row + 1 for row in range(rows)][::-1]
    states = arena(rng, 2 * rows + 1, (heads, value, key), state_dtype)
    for slot in slots:
        states.fill(slot, rng.normal(heads, value, key))
    rest = (rng.index(slots), max_beta, floor)
    expected_state = states.view.float().clone()
    expected = delta_reference.delta_update(
        q.float(), k.float(), v.float(), *gates, expected_state, *rest
    )
    rounding = Rounding(7, rng.index([100 + 3 * row for row in range(rows)])) if is_random else None
    poison(v.numel(), device)
    o = module.delta_update(q, k, v, *gates, states.view, *rest, rounding)

    assert o.dtype == dtype
    assert_close(o, expected)
    states.assert_only_changed(slots)
    assert_close(states.view[slots], expected_state[slots], state_dtype)
    if rounding is not None:
        rounded = round_state(expected_state[slots], state_dtype, rounding)
        assert (states.view[slots] == rounded).float().mean() > 0.95  # not so to the nearest


def check_rg_lru(
    module: ModuleType,
    device: str,
    lengths: list[int],
    has_state: list[bool] | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    blocks: int = 10,
    width: int = 256,
) -> None:
    """has_state None: rows of one token through `rg_lru_update`."""
    rng = Random(device)
    num_tokens, rows = sum(lengths), len(lengths)
    x = rng.normal(num_tokens, blocks, width + 3, dtype=dtype)[..., 3:]
    # Both gates come out of one product by block.
    gates = rng.normal(blocks, num_tokens, 2 * width, dtype=dtype).transpose(0, 1)
    gates = gates.split(width, dim=-1)
    # Some channels hardly forget; less, and fp32 itself would not reach over a long prompt.
    A = -8 * torch.rand(blocks, width, device=device) ** 4 - 0.01
    slots = [2 * row + 1 for row in range(rows)][::-1]
    states = arena(rng, 2 * rows + 1, (blocks, width), state_dtype)
    for slot, is_live in zip(slots, has_state or [True] * rows, strict=True):
        if is_live:
            states.fill(slot, rng.normal(blocks, width))
    if has_state is None:
        name, rest = "rg_lru_update", (rng.index(slots),)
    else:
        name, live = "rg_lru_prefill", torch.tensor(has_state, device=device)
        rest = (rng.index(slots), rng.starts(lengths), live)
    expected_state = states.view.float().clone()
    expected = getattr(rg_lru_reference, name)(
        x.float(), *(gate.float() for gate in gates), A, expected_state, *rest
    )
    poison(x.numel(), device)
    h = getattr(module, name)(x, *gates, A, states.view, *rest)

    assert h.dtype == dtype
    assert_close(h, expected)
    touched = [slot for slot, length in zip(slots, lengths, strict=True) if length]
    states.assert_only_changed(touched)
    assert_close(states.view[touched], expected_state[touched], state_dtype)


def check_conv1d(
    module: ModuleType,
    device: str,
    lengths: list[int],
    has_state: list[bool] | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    channels: tuple[int, ...] = (6, 3, 3),
    taps: int = 4,
    activation: str | None = "silu",
    has_bias: bool = True,
) -> None:
    """has_state None: rows of one token through `conv1d_update`."""
    rng = Random(device)
    rows, width = len(lengths), sum(channels)
    x = rng.normal(sum(lengths), width + 5, dtype=dtype)[:, 5:]
    weight = rng.normal(width, taps, dtype=dtype)
    bias = rng.normal(width, dtype=dtype) if has_bias else None
    slots = [2 * row + 1 for row in range(rows)][::-1]
    windows = [arena(rng, 2 * rows + 1, (part, taps - 1), dtype) for part in channels]
    for slot, is_live in zip(slots, has_state or [True] * rows, strict=True):
        for window, part in zip(windows, channels, strict=True):
            if is_live:
                window.fill(slot, rng.normal(part, taps - 1))
    views = [window.view for window in windows]
    copies = [view.float().clone() for view in views]
    args = (x.float(), weight.float(), None if bias is None else bias.float())
    if has_state is None:
        name, rest = "conv1d_update", (rng.index(slots), activation)
    else:
        live = torch.tensor(has_state, device=device)
        name = "conv1d_prefill"
        rest = (rng.index(slots), rng.starts(lengths), live, activation)
    expected = getattr(conv1d_reference, name)(*args, copies, *rest)
    poison(x.numel(), device)
    y = getattr(module, name)(x, weight, bias, views, *rest)

    assert y.dtype == dtype
    assert_close(y, expected)
    touched = [slot for slot, length in zip(slots, lengths, strict=True) if length]
    for window, copy in zip(windows, copies, strict=True):
        window.assert_only_changed(touched)
        assert torch.equal(window.view[touched].float(), copy[touched])  # raw inputs, only moved


def check_attention(
    module: ModuleType,
    device: str,
    lengths: list[int],
    contexts: list[int],
    num_decode: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    page_tokens: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 128,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    rng = Random(device)
    num_pages = [-(-context // page_tokens) for context in contexts]
    total = sum(num_pages)
    pages_of = torch.randperm(2 * total + 1, generator=torch.Generator().manual_seed(1)).tolist()
    pages = arena(rng, 2 * total + 1, (kv_heads, 2, page_tokens, head_dim), dtype)
    # Entries beyond the context name no page at all.
    table = torch.full((len(contexts), max(num_pages) + 2), 1 << 30, dtype=torch.int32)
    where: list[int] = []
    for row, count in enumerate(num_pages):
        own = pages_of[len(where) : len(where) + count]
        where += own
        table[row, :count] = torch.tensor(own, dtype=torch.int32)
    positions = [torch.arange(context) for context in contexts]
    token_pages = torch.cat(
        [table[row, at // page_tokens].long() for row, at in enumerate(positions)]
    ).to(device)
    offsets = torch.cat([at % page_tokens for at in positions]).to(device)
    k, v = rng.normal(2, sum(contexts), kv_heads, head_dim, dtype=dtype)
    module.write_kv(k, v, pages.view, token_pages, offsets)
    assert torch.equal(pages.view[token_pages, :, 0, offsets], k)
    assert torch.equal(pages.view[token_pages, :, 1, offsets], v)
    assert int((~pages.view.isnan()).sum()) == k.numel() + v.numel()

    q = rng.normal(sum(lengths), heads + 1, head_dim, dtype=dtype)[:, 1:]
    rest = (
        table.to(device),
        rng.starts(lengths),
        rng.index(contexts, torch.int32),
        head_dim**-0.5,
        num_decode,
        window,
        softcap,
    )
    expected = attention_reference.paged_attention(q.float(), pages.view.float(), *rest)
    poison(q.numel(), device)
    out = module.paged_attention(q, pages.view, *rest)
    assert out.dtype == dtype
    assert_close(out, expected)


def check_latent_attention(
    module: ModuleType,
    device: str,
    lengths: list[int],
    contexts: list[int],
    num_decode: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    page_tokens: int = 16,
    heads: int = 32,
    value_size: int = 512,
    position_size: int = 64,
) -> None:
    rng = Random(device)
    width = value_size + position_size
    num_pages = [-(-context // page_tokens) for context in contexts]
    total = sum(num_pages)
    order = torch.randperm(2 * total + 1, generator=torch.Generator().manual_seed(1)).tolist()
    pages = arena(rng, 2 * total + 1, (1, 1, page_tokens, width), dtype)
    # Entries beyond the context name no page at all.
    table = torch.full((len(contexts), max(num_pages) + 2), 1 << 30, dtype=torch.int32)
    used = 0
    for row, (context, count) in enumerate(zip(contexts, num_pages, strict=True)):
        table[row, :count] = torch.tensor(order[used : used + count], dtype=torch.int32)
        used += count
        at = torch.arange(context)
        where = (table[row, at // page_tokens].long().to(device), (at % page_tokens).to(device))
        pages.view[where[0], 0, 0, where[1]] = rng.normal(context, width, dtype=dtype)
    q = rng.normal(sum(lengths), heads + 1, width, dtype=dtype)[:, 1:]
    rest = (
        table.to(device),
        rng.starts(lengths),
        rng.index(contexts, torch.int32),
        width**-0.5,
        num_decode,
        value_size,
    )
    expected = latent_reference.latent_attention(q.float(), pages.view.float(), *rest)
    poison(q.numel(), device)
    out = module.latent_attention(q, pages.view, *rest)
    assert (out.dtype, out.shape) == (dtype, (*q.shape[:2], value_size))
    assert_close(out, expected)


def check_rotary(
    module: ModuleType,
    device: str,
    num_tokens: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 128,
    rot_dim: int = 128,
    page_tokens: int = 16,
) -> None:
    rng = Random(device)
    heads_of_all = rng.normal(num_tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, v = heads_of_all.split([heads, kv_heads, kv_heads], dim=1)
    angles = rng.normal(3 * num_tokens + 1, rot_dim // 2)
    positions = (torch.arange(num_tokens, device=device) * 3) % (3 * num_tokens + 1)
    num_pages = num_tokens // page_tokens + 1
    pages = arena(rng, 2 * num_pages + 1, (kv_heads, 2, page_tokens, head_dim), dtype)
    at = torch.arange(num_tokens, device=device)
    where = (2 * (at // page_tokens) + 1, at % page_tokens)
    turns = (positions, angles.cos(), angles.sin(), rot_dim)
    wide = pages.view.float().clone()
    expected = rotary_reference.rotate_and_write(
        q.float(), k.float(), v.float(), *turns, wide, *where
    )
    poison(q.numel(), device)
    out = module.rotate_and_write(q, k, v, *turns, pages.view, *where)
    assert out.dtype == dtype
    assert_close(out, expected)
    assert torch.equal(out[..., rot_dim:], q[..., rot_dim:])
    keys, values = (pages.view[where[0], :, part, where[1]] for part in (0, 1))
    assert_close(keys, wide[where[0], :, 0, where[1]])
    assert torch.equal(values, v)
    assert int((~pages.view.isnan()).sum()) == k.numel() + v.numel()


def check_norms(
    module: ModuleType, device: str, num_tokens: int, width: int, dtype: torch.dtype
) -> None:
    rng = Random(device)
    x, weight = (
        rng.normal(num_tokens, width + 3, dtype=dtype)[:, 3:],
        rng.normal(width, dtype=dtype),
    )
    poison(x.numel(), device)
    assert_close(
        module.rms_norm(x, weight, 1e-5),
        norm_reference.rms_norm(x.float(), weight.float(), 1e-5),
        dtype,
    )
    for residual_dtype in {dtype, torch.float32}:
        residual = rng.normal(num_tokens, width, dtype=residual_dtype)
        out, total = module.add_rms_norm(x, residual, weight, 1e-5)
        expected, expected_total = norm_reference.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, expected_total)
        assert_close(out, expected.float())


def check_gated_norm(
    module: ModuleType,
    device: str,
    num_tokens: int,
    groups: int,
    group_size: int,
    dtype: torch.dtype,
) -> None:
    rng = Random(device)
    width = groups * group_size
    y, weight = rng.normal(num_tokens, width, dtype=dtype), rng.normal(width, dtype=dtype)
    gate = rng.normal(num_tokens, width + 7, dtype=dtype)[:, :width]
    poison(y.numel(), device)
    out = module.gated_rms_norm(y, gate, weight, 1e-5, group_size)
    expected = norm_reference.gated_rms_norm(
        y.float(), gate.float(), weight.float(), 1e-5, group_size
    )
    assert_close(out, expected, dtype)


def check_norm_gate(
    module: ModuleType,
    device: str,
    num_tokens: int,
    groups: int,
    group_size: int,
    activation: str,
    dtype: torch.dtype,
) -> None:
    """With a weight of all channels, and one that all groups share."""
    rng = Random(device)
    width = groups * group_size
    y, weight = rng.normal(num_tokens, width, dtype=dtype), rng.normal(width, dtype=dtype)
    gate = rng.normal(num_tokens, width + 7, dtype=dtype)[:, :width]
    for own in (weight, weight[:group_size]):
        poison(y.numel(), device)
        out = module.norm_gate(y, gate, own, 1e-5, group_size, activation)
        expected = norm_gate_reference.norm_gate(
            y.float(), gate.float(), own.float(), 1e-5, group_size, activation
        )
        assert_close(out, expected, dtype)


def check_activations(
    module: ModuleType, device: str, num_tokens: int, width: int, dtype: torch.dtype
) -> None:
    x = Random(device).normal(num_tokens, 2 * width, dtype=dtype)
    poison(x.numel(), device)
    assert_close(module.relu2(x), activation_reference.relu2(x.float()), dtype)
    assert_close(module.silu_mul(x), activation_reference.silu_mul(x.float()), dtype)


def check_routing(
    module: ModuleType,
    device: str,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    normalize: bool,
    *,
    score: str = "sigmoid",
    groups: tuple[int, int] = (1, 1),
    has_bias: bool = True,
    has_ties: bool = False,
) -> None:
    rng = Random(device)
    logits, bias = rng.normal(num_tokens, num_experts), rng.normal(num_experts)
    if has_ties:
        logits, bias = logits.round(), bias.round()
    rest = (logits, bias if has_bias else None, top_k, *groups, normalize, 2.5, score)
    expected_weights, expected_ids = experts_reference.route(*rest)
    poison(num_tokens * top_k, device)
    weights, ids = module.route(*rest)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, expected_ids)
    assert weights.dtype == torch.float32
    assert_close(weights, expected_weights)


def check_router(
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    device: str,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    inputs: int = 96,
    dtype: torch.dtype = torch.bfloat16,
    score: str = "sigmoid",
    groups: tuple[int, int] = (1, 1),
    has_bias: bool = True,
) -> None:
    """`route(hidden, gate, bias, ...)` chooses as exact arithmetic does, but for near ties."""
    rng = Random(device)
    hidden = rng.normal(num_tokens, inputs + 8, dtype=dtype)[:, 8:]
    gate, bias = rng.normal(num_experts, inputs) * inputs**-0.5, rng.normal(num_experts) / 8
    rest = (bias if has_bias else None, top_k, *groups, True, 2.5, score)
    logits = (hidden.double() @ gate.double().T).float()
    expected_weights, expected_ids = experts_reference.route(logits, *rest)
    poison(num_tokens * num_experts, device)
    weights, ids = route(hidden, gate, *rest)
    is_same = (ids == expected_ids).all(1)
    assert_close(weights[is_same], expected_weights[is_same])
    # Where they differ, another pair of scores is as good within the rounding of fp32.
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    corrected = scores + (bias if has_bias else 0)
    found, wanted = (corrected.gather(1, chosen)[~is_same] for chosen in (ids, expected_ids))
    assert_close(found, wanted, torch.float32)
    assert (~is_same).float().mean() < 1e-3


def check_best_tokens(
    module: ModuleType, device: str, num_rows: int, vocab: int, dtype: torch.dtype = torch.float32
) -> None:
    logits = Random(device).normal(num_rows, vocab + 5, dtype=dtype)[:, 5:]
    logits[num_rows // 2] = -torch.inf  # all alike
    if vocab > 2:
        logits[-1, [vocab // 3, vocab // 2, vocab - 1]] = 50.0
    expected = torch.stack([torch.nonzero(row == row.max())[0, 0] for row in logits])
    assert torch.equal(module.best_tokens(logits), expected)
    logits[0, vocab - 1] = torch.nan
    expected[0] = vocab - 1
    out = torch.full((num_rows,), -1, device=device)
    assert module.best_tokens(logits, out) is out
    assert torch.equal(out, expected)


def check_linear(
    device: str,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    has_bias: bool = False,
    tiles: dict[str, int] | None = None,
) -> None:
    """Rows and weights lie in wider memory, at multiples of 16 bytes; beside them is NaN."""
    from tandem.ops.linear import triton as linear

    rng = Random(device)
    width = -(-(num_inputs + 8) // 8) * 8
    x = rng.normal(num_rows, width, dtype=dtype)
    x[:, :8] = x[:, 8 + num_inputs :] = torch.nan
    weight = (rng.normal(num_outputs, width + 8) * num_inputs**-0.5).to(dtype)
    weight[:, num_inputs:] = torch.nan
    x, weight = x[:, 8 : 8 + num_inputs], weight[:, :num_inputs]
    bias = rng.normal(num_outputs, dtype=dtype) if has_bias else None
    expected = x.float() @ weight.float().T
    if bias is not None:
        expected += bias.float()
    if activation is not None:
        expected = activation_reference.relu2(expected)
    wide = torch.full((num_rows + 1, num_outputs + 8), torch.nan, device=device)
    wide = wide.to(out_dtype or dtype)
    out = wide[:num_rows, :num_outputs]
    counts = linear.counters(weight)
    if tiles is None:
        tiles = linear.linear_tiles(num_rows, num_outputs, num_inputs, 132)
        if tiles is linear.LIBRARY:
            tiles = linear.linear_tiles(num_rows, 64, num_inputs, 132)
    results = []
    for _ in range(2):  # the second time with the counters that the first one left
        poison(8 * num_rows * num_outputs, device)
        out.fill_(torch.nan)
        assert linear.launch(x, weight, bias, counts, activation, out, tiles) is out
        assert_close(out, expected)
        results.append(out.clone())
    assert torch.equal(*results)
    assert not bool(counts.any())
    assert bool(wide[num_rows].isnan().all())
    assert bool(wide[:, num_outputs:].isnan().all())


def check_experts(
    module: ModuleType,
    device: str,
    num_tokens: int,
    activation: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_experts: int = 16,
    hidden: int = 96,
    inner: int = 80,
    top_k: int = 3,
    num_chosen: int | None = None,
) -> None:
    """num_chosen: how many of the experts get tokens; by default all but the last."""
    rng = Random(device)
    num_chosen = num_experts - 1 if num_chosen is None else num_chosen
    x = rng.normal(num_tokens, hidden, dtype=dtype)
    width = inner * (2 if activation == "silu_gated" else 1)
    up = (rng.normal(num_experts, width, hidden) * hidden**-0.5).to(dtype)
    down = (rng.normal(num_experts, hidden, inner) * inner**-0.5).to(dtype)
    weights, ids = rng.normal(num_tokens, num_chosen).softmax(-1).topk(top_k)
    up[num_chosen:] = down[num_chosen:] = torch.nan
    expected = experts_reference.experts_mlp(
        x.float(), up.float(), down.float(), weights, ids, activation
    )
    base = rng.normal(num_tokens, hidden, dtype=dtype)
    kept = base.clone()
    for added, value in ((None, expected), (base, expected + base.float())):
        poison(num_tokens * top_k * max(hidden, inner), device)
        out = module.experts_mlp(x, up, down, weights, ids, activation, added)
        assert out.dtype == dtype
        assert_close(out, value)
    assert torch.equal(base, kept)


def sampling_problem(
    device: str, num_rows: int, vocab: int, cuts: str, sharpness: float, has_ties: bool
) -> tuple:
    """Arguments of `draw`. cuts: of k, p and m, which of top-k, top-p and min-p rows have; each row
    has its own, and every fourth none."""
    rng = Random(device, vocab + num_rows)
    logits = rng.normal(num_rows + 2, vocab) * sharpness
    if has_ties:
        logits = (2 * logits).round() / 2
    logits[:, 1 : vocab // 7] = -torch.inf
    rows = torch.arange(num_rows + 1, 1, -1, device=device)
    at = torch.arange(num_rows, device=device)
    has_cut = at % 4 != 3
    temperature = 0.25 + (at % 5) / 2
    uniform = torch.rand(num_rows, generator=torch.Generator().manual_seed(vocab)).double()
    top_k = torch.where(has_cut & ("k" in cuts), 1 + at * 13 % min(vocab - 1, 700), 1 << 31)
    top_p = torch.where(has_cut & ("p" in cuts), 0.05 + 0.94 * (at % 9) / 8, 2.0).double()
    min_p = torch.where(has_cut & ("m" in cuts), 0.3 / (1 + at % 6), 0.0).float()
    cut = ((top_k < vocab) | (top_p < 1)).nonzero().flatten()
    long = cut if len(cut) else None
    return (
        logits, rows, temperature.float(), uniform.to(device), top_k, top_p, min_p, 0, None, long
    )  # fmt: skip


def check_draw(
    module: ModuleType,
    device: str,
    num_rows: int,
    vocab: int,
    cuts: str = "",
    *,
    sharpness: float = 3.0,
    has_ties: bool = False,
    num_apart: int = 0,
) -> None:
    """num_apart: how many draws may fall apart because sums are rounded in another order."""
    problem = sampling_problem(device, num_rows, vocab, cuts, sharpness, has_ties)
    kept = problem[0].clone()
    expected = sampling_reference.draw(*problem)
    poison(4 * problem[0].numel(), device)
    tokens = module.draw(*problem)
    assert tokens.dtype == torch.int64
    assert int((tokens != expected).sum()) <= num_apart
    assert torch.equal(module.draw(*problem), tokens)
    assert torch.equal(problem[0], kept)


def check_penalties(module: ModuleType, device: str, num_rows: int, vocab: int) -> None:
    rng = Random(device)
    logits = rng.normal(num_rows + 1, vocab)
    rows = torch.arange(num_rows, 0, -1, device=device)
    slots = 2 * torch.arange(num_rows, device=device) + 1
    generated = (rng.normal(2 * num_rows + 1, vocab) * 2).clamp(min=0).int()
    is_in_prompt = rng.normal(2 * num_rows + 1, vocab) > 1
    factors = (rng.normal(num_rows).exp(), rng.normal(num_rows), rng.normal(num_rows))
    expected = logits.clone()
    tables = (rows, slots, generated, is_in_prompt)
    sampling_reference.penalize(expected, *tables, *factors)
    module.penalize(logits, *tables, *factors)
    assert torch.equal(logits[0], expected[0])
    assert_close(logits, expected.double())


def check_experts_and_shared(
    device: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_experts: int = 16,
    hidden: int = 96,
    inner: int = 80,
    shared_inner: int = 200,
    top_k: int = 3,
) -> None:
    from tandem.ops.experts import one_triton

    rng = Random(device)
    x = rng.normal(1, hidden, dtype=dtype)
    up = (rng.normal(num_experts, inner, hidden) * hidden**-0.5).to(dtype)
    down = (rng.normal(num_experts, hidden, inner) * inner**-0.5).to(dtype)
    shared_up = (rng.normal(shared_inner, hidden) * hidden**-0.5).to(dtype)
    shared_down = (rng.normal(hidden, shared_inner) * shared_inner**-0.5).to(dtype)
    weights, ids = rng.normal(1, num_experts - 1).softmax(-1).topk(top_k)
    up[-1] = down[-1] = torch.nan
    own = activation_reference.relu2(x.float() @ shared_up.float().T) @ shared_down.float().T
    expected = experts_reference.experts_mlp(
        x.float(), up.float(), down.float(), weights, ids, "relu2", own
    )
    assert one_triton.takes(x, up, down, shared_up, shared_down, "relu2") is (dtype.itemsize == 2)
    poison(64 * inner, device)
    out = one_triton.experts_and_shared(x, up, down, weights, ids, shared_up, shared_down)
    assert out.dtype == dtype
    assert_close(out, expected)


def check_places(device: str, num_tokens: int, num_experts: int, top_k: int = 3) -> None:
    """Rows of pairs in order within their expert, and tiles of 128 or 64 rows that cover them."""
    from tandem.ops.experts.prefill_triton import order_rows

    scores = Random(device).normal(num_tokens, num_experts).square()
    ids = (scores * torch.arange(num_experts, device=device)).topk(top_k).indices
    poison(num_tokens * top_k, device)
    order = order_rows(ids, num_experts)
    places, tiles = order.places.tolist(), order.tiles.tolist()
    assert order.tokens[order.places.long()].tolist() == [
        token for token in range(num_tokens) for _ in range(top_k)
    ]
    assert order.turns.tolist() == [0, 0]
    chosen, start, expected = ids.flatten().tolist(), 0, []
    for expert in range(num_experts):
        own = [pair for pair, choice in enumerate(chosen) if choice == expert]
        assert [places[pair] for pair in own] == list(range(start, start + len(own)))
        for first in range(0, len(own), 128):
            expected += [4 * expert + (1 if len(own) - first <= 64 else 2), start + first]
        start += -(-len(own) // 64) * 64
    assert tiles[0] == len(expected) // 2
    assert tiles[1 : 1 + len(expected)] == expected


def coarser(*dtypes: torch.dtype) -> torch.dtype:
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
