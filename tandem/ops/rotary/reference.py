"""Rotary position embedding in plain torch, in the half-rotation form of GPT-NeoX."""

import torch

from tandem.ops.attention.reference import write_kv


def rotary_frequencies(
    rot_dim: int, theta: float, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """theta^(-2i / rot_dim), radians a token, fp32 [rot_dim / 2]."""
    exponents = torch.arange(0, rot_dim, 2, dtype=torch.float32, device=device) / rot_dim
    return 1.0 / theta**exponents


def rotary_tables(
    frequencies: torch.Tensor, max_positions: int, magnitude: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of angles position * frequency, times `magnitude`: fp32 [max_positions, F]."""
    positions = torch.arange(max_positions, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    if magnitude == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * magnitude, angles.sin() * magnitude


def apply_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rot_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn channel pairs (i, i + rot_dim / 2) of q and k by the angle of their position.

    Args:
        q, k: [T, H, D], each with its own H; channels from rot_dim on pass through unchanged.
        positions: integer [T].    cos, sin: fp32 [max_positions, rot_dim / 2].

    Returns: new (q, k) in their dtypes; arithmetic in fp32.
    Source: Su et al. 2021, arXiv:2104.09864.
    """
    index = positions.long()
    c, s = cos[index].unsqueeze(1), sin[index].unsqueeze(1)  # [T, 1, rot_dim / 2]
    return _rotate(q, c, s, rot_dim), _rotate(k, c, s, rot_dim)


def rotate_and_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rot_dim: int,
    kv: torch.Tensor,
    token_pages: torch.Tensor,
    token_offsets: torch.Tensor,
) -> torch.Tensor:
    """`apply_rotary`, then `write_kv` of the turned keys and of v [T, Hkv, D] into `kv`.

    Returns: the turned queries, new, in q.dtype.
    """
    q, k = apply_rotary(q, k, positions, cos, sin, rot_dim)
    write_kv(k, v, kv, token_pages, token_offsets)
    return q


def _rotate(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor, rot_dim: int) -> torch.Tensor:
    first, second = x[..., :rot_dim].to(torch.promote_types(x.dtype, c.dtype)).chunk(2, dim=-1)
    turned = torch.cat([first * c - second * s, second * c + first * s], dim=-1).to(x.dtype)
    return torch.cat([turned, x[..., rot_dim:]], dim=-1) if rot_dim < x.shape[-1] else turned
