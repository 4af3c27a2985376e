"""Norms against their formula in float64, and against the modules of transformers."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHRMSNorm,
    NemotronHRMSNormGated,
)
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from tandem.ops.norm.reference import add_rms_norm, gated_rms_norm, rms_norm
from tests.tolerances import assert_close

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def formula(x, weight, group_size=None):
    grouped = x.double().unflatten(-1, (-1, group_size or x.shape[-1]))
    normed = grouped / (grouped.square().mean(-1, keepdim=True) + EPS).sqrt()
    return normed.flatten(-2) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 8), (1, 7), (63, 48)])
def test_rms_norm_equals_formula(num_tokens, width, dtype):
    x, weight = randn(num_tokens, width).to(dtype), randn(width, seed=1).to(dtype)
    out = rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    assert_close(out, formula(x, weight))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rms_norm_equals_transformers(dtype):
    x = randn(9, 48).to(dtype)
    module = NemotronHRMSNorm(48, EPS).to(dtype)
    module.weight.data = randn(48, seed=1).to(dtype)
    with torch.no_grad():
        assert torch.equal(rms_norm(x, module.weight, EPS), module(x))


@pytest.mark.parametrize("scale", [1e-12, 1e4])
def test_small_and_large_values_neither_vanish_nor_overflow(scale):
    x = (randn(3, 16) * scale).half()
    assert_close(rms_norm(x, torch.ones(16).half(), EPS), formula(x, torch.ones(16)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_the_sum_and_its_norm(dtype):
    x, residual = randn(5, 24).to(dtype), randn(5, 24, seed=1).to(dtype)
    weight = randn(24, seed=2).to(dtype)
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, EPS)

    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, EPS))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "group_size"), [(24, 24), (24, 8), (24, 1), (30, 5)])
def test_gated_norm_equals_formula(width, group_size, dtype):
    y, gate = randn(7, width).to(dtype), randn(7, width, seed=1).to(dtype)
    weight = randn(width, seed=2).to(dtype)
    out = gated_rms_norm(y, gate, weight, EPS, group_size)
    assert out.dtype == dtype
    assert_close(out, formula(y.double() * F.silu(gate.double()), weight, group_size))


@pytest.mark.parametrize("module_class", [NemotronHRMSNormGated, Zamba2RMSNormGated])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_gated_norm_equals_transformers(module_class, dtype):
    module = module_class(32, group_size=8, eps=EPS).to(dtype)
    module.weight.data = randn(32, seed=2).to(dtype)
    # The gate is a slice of a wider projection.
    y, gate = randn(6, 32).to(dtype), randn(6, 50, seed=1).to(dtype)[:, :32]
    with torch.no_grad():
        expected = module(y, gate)
        assert_close(gated_rms_norm(y, gate, module.weight, EPS, 8), expected, dtype)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_group_that_spans_ranks_equals_the_whole(num_ranks, num_groups):
    """Each rank holds a share of every group; `all_reduce` sums what all of them have to add."""
    group_size = 16
    y, gate = randn(5, num_groups * group_size), randn(5, num_groups * group_size, seed=1)
    weight = randn(num_groups * group_size, seed=2)
    share = group_size // num_ranks

    def of_rank(x, rank):
        parts = x.unflatten(-1, (num_groups, num_ranks, share))
        return parts[..., rank, :].flatten(-2)

    def run(rank, all_reduce):
        args = (of_rank(x, rank) for x in (y, gate, weight))
        return gated_rms_norm(*args, EPS, share, all_reduce, group_size)

    squares = []
    for rank in range(num_ranks):
        run(rank, lambda x: squares.append(x) or x)
    expected = formula(y * F.silu(gate), weight, group_size)
    for rank in range(num_ranks):
        out = run(rank, lambda _: torch.stack(squares).sum(0))
        assert_close(out, of_rank(expected, rank))
