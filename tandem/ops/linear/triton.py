"""Linear layers of few rows as Triton kernels: what they take is the time to read the weights.

One row: a program has a few outputs over all inputs, and asks for its first weights before the row
is there. More rows: matrix instructions, over all inputs or, where there are too few outputs to
keep the device busy, over one of a few runs of inputs. Runs are joined by the program that ends
last, in the order of the inputs, so that the result does not depend on who that was.
"""

import torch
import triton
import triton.language as tl

from tandem.ops.dependent import LINE_NBYTES, allow_next, dependent, read_ahead, wait_for_inputs
from tandem.ops.tiles import kernel, num_processors
from tandem.ops.tuning import Tiles, tuned

MAX_ROWS = 64
ACTIVATIONS = {None: 0, "relu2": 1}
# A table may say that the library's product is better than any tiles.
LIBRARY: Tiles = {"LIBRARY": 1}
# A tile of outputs in runs is no smaller than this: so many counters a layer needs at most.
_MIN_OUTPUTS = 16
# Inputs of one run at least: below that, joining costs more than it saves.
_MIN_RUN = 512


def takes(x: torch.Tensor, weight: torch.Tensor, activation: str | None) -> bool:
    """Whether `linear` can run: few rows of 16 bits."""
    return (
        x.dim() == 2
        and 0 < len(x) <= MAX_ROWS
        and x.dtype is weight.dtype
        and x.element_size() == 2
        and x.stride(1) == weight.stride(1) == 1
        and activation in ACTIVATIONS
        and not x.requires_grad
    )


def counters(weight: torch.Tensor) -> torch.Tensor:
    """What `linear` needs for each layer of its own: int32 zeros."""
    num_tiles = triton.cdiv(len(weight), _MIN_OUTPUTS)
    return torch.zeros(num_tiles, dtype=torch.int32, device=weight.device)


def linear_tiles(num_rows: int, num_outputs: int, num_inputs: int, processors: int) -> Tiles:
    """Tiles where none were measured."""
    if num_rows == 1:
        if num_inputs % 2048 == 0:
            return {"BN": 2, "BK": 2048, "num_warps": 4}
        return {"BN": 4, "BK": min(1024, triton.next_power_of_2(num_inputs)), "num_warps": 2}
    tiles = {"BN": 64, "BK": 128, "IS_TURNED": 1, "num_warps": 4}
    programs = triton.cdiv(num_outputs, tiles["BN"])
    if programs <= processors and num_rows <= 32:
        runs = max(1, min(processors // programs, num_inputs // _MIN_RUN, 8))
        return tiles | {"RUNS": runs, "AHEAD": 512, "num_stages": 6}
    # Many waves of programs, or a little more than one of them, which is the library's case.
    if programs > (2 if num_rows <= 16 else 8) * processors:
        stages = 4 if num_rows <= 32 else 3
        return tiles | {"RUNS": 1, "AHEAD": 0, "num_stages": stages}
    return LIBRARY


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counts: torch.Tensor,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """activation(x @ weight^T + bias), rounded once; None where the library is the better choice.

    Args:
        x: [M, K].    weight: [N, K].    bias: [N] or None.    activation: None or "relu2".
        counts: see `counters`; zero again afterwards.
        out: [M, N] of any float dtype; None for a new one in x.dtype.
    """
    (num_rows, num_inputs), num_outputs = x.shape, len(weight)
    tiles = linear_tiles(num_rows, num_outputs, num_inputs, num_processors(x.device))
    tiles = tuned(f"linear_{num_outputs}x{num_inputs}", num_rows, x.device, tiles)
    if "LIBRARY" in tiles:
        return None
    return launch(x, weight, bias, counts, activation, out, tiles)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counts: torch.Tensor,
    activation: str | None,
    out: torch.Tensor | None,
    tiles: Tiles,
) -> torch.Tensor:
    """`linear` with given tiles."""
    (num_rows, num_inputs), num_outputs = x.shape, len(weight)
    if out is None:
        out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    programs = triton.cdiv(num_outputs, tiles["BN"])
    if num_rows == 1:
        linear_row_kernel[(programs,)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            num_outputs,
            num_inputs,
            weight.stride(0),
            HAS_BIAS=bias is not None,
            ACTIVATION=ACTIVATIONS[activation],
            NUM_TILES=triton.cdiv(num_inputs, tiles["BK"]),
            **tiles,
            **dependent(x.device),
        )
        return out
    runs = tiles["RUNS"]
    parts = out
    if runs > 1:
        parts = torch.empty((runs, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    linear_rows_kernel[(programs, runs)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        parts,
        counts,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        HAS_BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS[activation],
        IS_EVEN=num_inputs % (tiles["BK"] * runs) == 0,
        BM=max(16, triton.next_power_of_2(num_rows)),
        **tiles,
        **dependent(x.device),
    )
    return out


@triton.jit
def _finish(b_out, p_bias, o_n, m_n, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Bias and activation of outputs o_n."""
    if HAS_BIAS:
        b_out += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    if ACTIVATION == 1:
        b_out = tl.where(b_out < 0.0, 0.0, b_out)  # NaN stays
        b_out = b_out * b_out
    return b_out


@kernel
def linear_row_kernel(
    p_x,
    p_w,
    p_bias,
    p_out,
    num_outputs,
    num_inputs,
    w_row,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """BN outputs of one row, BK inputs at a time; the weights of the next ones are on their way."""
    allow_next(IS_DEPENDENT)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_n = o_n < num_outputs
    p_tile = p_w + o_n.to(tl.int64)[:, None] * w_row + o_k[None, :]
    b_w = tl.load(p_tile, mask=m_n[:, None] & (o_k < num_inputs)[None, :], other=0.0)
    wait_for_inputs(IS_DEPENDENT)
    b_acc = tl.zeros([BN, BK], tl.float32)
    for i in tl.static_range(NUM_TILES):
        b_x = tl.load(p_x + i * BK + o_k, mask=i * BK + o_k < num_inputs, other=0.0)
        b_now = b_w
        if i + 1 < NUM_TILES:
            m_next = m_n[:, None] & ((i + 1) * BK + o_k < num_inputs)[None, :]
            b_w = tl.load(p_tile + (i + 1) * BK, mask=m_next, other=0.0)
        b_acc += b_now.to(tl.float32) * b_x.to(tl.float32)[None, :]
    b_out = _finish(tl.sum(b_acc, 1), p_bias, o_n, m_n, HAS_BIAS, ACTIVATION)
    tl.store(p_out + o_n, b_out.to(p_out.dtype.element_ty), mask=m_n)


@kernel
def linear_rows_kernel(
    p_x,
    p_w,
    p_bias,
    p_out,
    p_parts,
    p_counts,
    num_rows,
    num_outputs,
    num_inputs,
    x_row,
    w_row,
    out_row,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    RUNS: tl.constexpr,
    AHEAD: tl.constexpr,
    IS_TURNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """BN outputs of up to BM rows over one of RUNS runs of inputs.

    IS_TURNED: outputs are the left operand, as wide instructions take at least 64 rows there.
    AHEAD: so many inputs of the run are brought into the L2 cache before the rows are there.
    """
    allow_next(IS_DEPENDENT)
    i_n = tl.program_id(0)
    i_run = tl.program_id(1)
    o_n = i_n * BN + tl.arange(0, BN)
    o_m = tl.arange(0, BM)
    o_k = tl.arange(0, BK)
    m_n = o_n < num_outputs
    m_m = o_m < num_rows
    length = tl.cdiv(tl.cdiv(num_inputs, RUNS), BK) * BK
    first = i_run * length
    stop = tl.minimum(first + length, num_inputs)
    p_row = p_w + o_n.to(tl.int64)[:, None] * w_row
    if IS_DEPENDENT and AHEAD > 0:
        per_line: tl.constexpr = LINE_NBYTES // (p_w.dtype.element_ty.primitive_bitwidth // 8)
        o_line = first + tl.arange(0, AHEAD // per_line) * per_line
        read_ahead(p_row + o_line[None, :], m_n[:, None] & (o_line < stop)[None, :])
    wait_for_inputs(IS_DEPENDENT)
    p_x += o_m.to(tl.int64)[:, None] * x_row + (first + o_k)[None, :]
    p_row += (first + o_k)[None, :]
    if IS_TURNED:
        b_acc = tl.zeros([BN, BM], tl.float32)
    else:
        b_acc = tl.zeros([BM, BN], tl.float32)
    for k in range(first, stop, BK):
        if IS_EVEN:
            b_w = tl.load(p_row, mask=m_n[:, None], other=0.0)
            b_x = tl.load(p_x, mask=m_m[:, None], other=0.0)
        else:
            m_k = (o_k < stop - k)[None, :]
            b_w = tl.load(p_row, mask=m_n[:, None] & m_k, other=0.0)
            b_x = tl.load(p_x, mask=m_m[:, None] & m_k, other=0.0)
        if IS_TURNED:
            b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision="ieee")
        else:
            b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision="ieee")
        p_x += BK
        p_row += BK
    if IS_TURNED:
        b_acc = tl.trans(b_acc)
    m = m_m[:, None] & m_n[None, :]
    p_to = p_out + o_m.to(tl.int64)[:, None] * out_row + o_n[None, :]
    if RUNS == 1:
        b_out = _finish(b_acc, p_bias, o_n[None, :], m_n[None, :], HAS_BIAS, ACTIVATION)
        tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=m)
    else:
        o_part = o_m[:, None] * num_outputs + o_n[None, :]
        numel = num_rows * num_outputs
        tl.store(p_parts + i_run * numel + o_part, b_acc, mask=m)
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        if tl.atomic_add(p_counts + i_n, 1, sem="acq_rel", scope="gpu") == RUNS - 1:
            tl.store(p_counts + i_n, 0)
            b_sum = tl.zeros([BM, BN], tl.float32)
            for run in tl.static_range(RUNS):
                p_part = p_parts + run * numel + o_part
                b_sum += tl.load(p_part, mask=m, other=0.0, cache_modifier=".cg")
            b_out = _finish(b_sum, p_bias, o_n[None, :], m_n[None, :], HAS_BIAS, ACTIVATION)
            tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=m)
