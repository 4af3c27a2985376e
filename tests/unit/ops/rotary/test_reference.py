"""Rotary embedding against complex multiplication in float64, and against transformers' Bamba."""

import pytest
import torch
from transformers import BambaConfig
from transformers.models.bamba.modeling_bamba import BambaRotaryEmbedding, apply_rotary_pos_emb

from tandem.ops.rotary import rotate_and_write
from tandem.ops.rotary.reference import apply_rotary, rotary_frequencies, rotary_tables
from tests.tolerances import assert_close


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def turn(x, positions, rot_dim, theta):
    """Channels i and i + rot_dim / 2 as one complex number, times exp(i * angle)."""
    half = rot_dim // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double()[:, None, None] * frequencies
    pairs = torch.complex(x[..., :half].double(), x[..., half:rot_dim].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag, x[..., rot_dim:].double()], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "rot_dim"), [(16, 16), (16, 8), (12, 4)])
@pytest.mark.parametrize("positions", [[0], [], [5, 6, 7, 0, 40]], ids=str)
def test_rotary_turns_channel_pairs(head_dim, rot_dim, positions, dtype):
    positions = torch.tensor(positions, dtype=torch.int64)
    q = randn(len(positions), 6, head_dim).to(dtype)
    k = randn(len(positions), 2, head_dim, seed=1).to(dtype)
    cos, sin = rotary_tables(rotary_frequencies(rot_dim, 10000.0), 64)
    turned_q, turned_k = apply_rotary(q, k, positions, cos, sin, rot_dim)

    assert turned_q.dtype == turned_k.dtype == dtype
    assert_close(turned_q, turn(q, positions, rot_dim, 10000.0))
    assert_close(turned_k, turn(k, positions, rot_dim, 10000.0))
    assert torch.equal(turned_q[..., rot_dim:], q[..., rot_dim:])


@pytest.mark.parametrize("partial", [0.5, 1.0])
def test_rotary_equals_transformers(partial):
    config = BambaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": partial,
        },
    )
    positions = torch.tensor([0, 3, 17, 200])
    q, k = randn(4, 4, 16).float(), randn(4, 2, 16, seed=1).float()
    cos, sin = BambaRotaryEmbedding(config)(q, positions.unsqueeze(0))
    expected_q, expected_k = apply_rotary_pos_emb(
        q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), cos, sin
    )
    tables = rotary_tables(rotary_frequencies(int(16 * partial), 5000.0), 256)
    turned_q, turned_k = apply_rotary(q, k, positions, *tables, int(16 * partial))
    assert_close(turned_q, expected_q.squeeze(0).transpose(0, 1))
    assert_close(turned_k, expected_k.squeeze(0).transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_written_as_they_turn(dtype):
    """By the function that chooses: here the reference turns and the native kernel writes."""
    q, k, v = randn(5, 6, 12).to(dtype).split([2, 2, 2], dim=1)
    positions, at = torch.tensor([4, 0, 3, 9, 1]), torch.arange(5)
    cos, sin = rotary_tables(rotary_frequencies(8, 10000.0), 16)
    kv = torch.full((3, 2, 2, 8, 12), torch.nan, dtype=dtype)
    out = rotate_and_write(q, k, v, positions, cos, sin, 8, kv, at % 3, at)
    expected_q, expected_k = apply_rotary(q, k, positions, cos, sin, 8)
    assert torch.equal(out, expected_q)
    assert torch.equal(kv[at % 3, :, 0, at], expected_k)
    assert torch.equal(kv[at % 3, :, 1, at], v)
    assert int((~kv.isnan()).sum()) == k.numel() + v.numel()
