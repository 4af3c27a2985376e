"""Linear layers of few rows as Triton kernels: what they take is the time to read the weights.

One row: a program has a few outputs over all inputs, and asks for its first weights before the row
is there. More rows: matrix instructions on tiles that the hardware copies by tensor descriptors,
over all inputs or, where there are too few outputs to keep the device busy, over one of a few runs
of inputs. Runs are joined by the program that ends last, in the order of the inputs, so that the
result does not depend on who that was.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem.ops.dependent import allow_next, begin, dependent, wait_for_inputs
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
    """Whether `linear` can run: few rows of 16 bits; more than one only where descriptors do."""
    return (
        x.dim() == 2
        and 0 < len(x) <= MAX_ROWS
        and x.dtype is weight.dtype
        and x.element_size() == 2
        and x.stride(1) == weight.stride(1) == 1
        and activation in ACTIVATIONS
        and not x.requires_grad
        and (len(x) == 1 or (_is_boxed(x) and _is_boxed(weight)))
    )


def _is_boxed(x: torch.Tensor) -> bool:
    """Whether a descriptor can say where the rows lie."""
    return _has_descriptors(x.device) and x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0


@cache
def _has_descriptors(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def counters(weight: torch.Tensor) -> torch.Tensor:
    """What `linear` needs for each layer of its own: int32 zeros."""
    num_tiles = triton.cdiv(len(weight), _MIN_OUTPUTS)
    return torch.zeros(num_tiles, dtype=torch.int32, device=weight.device)


def linear_tiles(num_rows: int, num_outputs: int, num_inputs: int, processors: int) -> Tiles:
    """Tiles where none were measured."""
    if num_rows == 1:
        if num_inputs % 2048 == 0 or num_inputs > 8192:
            return {"BN": 2, "BK": 2048, "num_warps": 4 if num_inputs <= 4096 else 2}
        return {"BN": 4, "BK": min(1024, triton.next_power_of_2(num_inputs)), "num_warps": 2}
    is_few = num_rows <= 32
    programs = triton.cdiv(num_outputs, 64)
    tiles = {"BN": 64, "BK": 128, "IS_TURNED": 1, "RUNS": 1, "num_warps": 4, "num_stages": 6}
    if programs <= processors:
        if is_few:
            runs = min(processors // programs, num_inputs // _MIN_RUN, 4)
            return tiles | {"RUNS": max(1, runs)}
        outputs = 32 if triton.cdiv(num_outputs, 32) <= processors else 64
        return tiles | {"BN": outputs, "IS_TURNED": 0}
    if programs <= 2 * processors:
        # All programs at once, two to a processor: with less memory each.
        return tiles | {"num_stages": 3} if is_few else LIBRARY
    if programs > 8 * processors:
        return tiles | {"num_stages": 4 if is_few else 3}
    return tiles


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
    rows = max(16, triton.next_power_of_2(num_rows))
    linear_rows_kernel[(programs, runs)](
        TensorDescriptor.from_tensor(x, [rows, tiles["BK"]]),
        TensorDescriptor.from_tensor(weight, [tiles["BN"], tiles["BK"]]),
        weight if bias is None else bias,
        out,
        parts,
        counts,
        num_rows,
        num_outputs,
        num_inputs,
        out.stride(0),
        HAS_BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS[activation],
        BM=rows,
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


@triton.jit
def _add_tile(b_acc, b_w, p_x, p_tile, first, num_inputs, m_n, BK: tl.constexpr):
    """(b_acc with inputs from `first` on, the weights of the inputs behind them)."""
    o_k = first + tl.arange(0, BK)
    b_x = tl.load(p_x + o_k, mask=o_k < num_inputs, other=0.0)
    m_next = m_n[:, None] & (o_k + BK < num_inputs)[None, :]
    b_next = tl.load(p_tile + first + BK, mask=m_next, other=0.0)
    return b_acc + b_w.to(tl.float32) * b_x.to(tl.float32)[None, :], b_next


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
    if NUM_TILES <= 4:
        for i in tl.static_range(NUM_TILES):
            b_acc, b_w = _add_tile(b_acc, b_w, p_x, p_tile, i * BK, num_inputs, m_n, BK)
    else:
        for i in range(NUM_TILES):
            b_acc, b_w = _add_tile(b_acc, b_w, p_x, p_tile, i * BK, num_inputs, m_n, BK)
    b_out = _finish(tl.sum(b_acc, 1), p_bias, o_n, m_n, HAS_BIAS, ACTIVATION)
    tl.store(p_out + o_n, b_out.to(p_out.dtype.element_ty), mask=m_n)


@kernel
def linear_rows_kernel(
    x_box,
    w_box,
    p_bias,
    p_out,
    p_parts,
    p_counts,
    num_rows,
    num_outputs,
    num_inputs,
    out_row,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RUNS: tl.constexpr,
    IS_TURNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """BN outputs of up to BM rows over one of RUNS runs of inputs.

    IS_TURNED: outputs are the left operand, as wide instructions take at least 64 rows there.
    """
    begin(IS_DEPENDENT)
    i_n = tl.program_id(0)
    i_run = tl.program_id(1)
    length = tl.cdiv(tl.cdiv(num_inputs, RUNS), BK) * BK
    first = i_run * length
    stop = tl.minimum(first + length, num_inputs)
    if IS_TURNED:
        b_acc = tl.zeros([BN, BM], tl.float32)
    else:
        b_acc = tl.zeros([BM, BN], tl.float32)
    for k in range(first, stop, BK):
        # What lies outside of a tensor is read as zero.
        b_w = w_box.load([i_n * BN, k])
        b_x = x_box.load([0, k])
        if IS_TURNED:
            b_acc = tl.dot(b_w, b_x.T, b_acc, input_precision="ieee")
        else:
            b_acc = tl.dot(b_x, b_w.T, b_acc, input_precision="ieee")
    if IS_TURNED:
        b_acc = tl.trans(b_acc)
    o_n = i_n * BN + tl.arange(0, BN)
    o_m = tl.arange(0, BM)
    m_n = o_n < num_outputs
    m = (o_m < num_rows)[:, None] & m_n[None, :]
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
