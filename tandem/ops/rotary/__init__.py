"""Rotary position embedding; see `reference` and, for long contexts, `scaling`."""

import torch

from tandem.ops.attention import write_kv
from tandem.ops.dispatch import choose
from tandem.ops.rotary import reference
from tandem.ops.rotary.reference import apply_rotary, rotary_frequencies, rotary_tables
from tandem.ops.rotary.scaling import scale_by_channels, scale_by_turns

__all__ = [
    "apply_rotary",
    "rotary_frequencies",
    "rotary_tables",
    "rotate_and_write",
    "scale_by_channels",
    "scale_by_turns",
]


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
    """Turned queries; turned keys and values go to their pages. See `reference`."""
    module = choose("rotary", reference, q)
    if module is reference:
        # Apart, so that the writing may still be a native kernel's.
        q, k = apply_rotary(q, k, positions, cos, sin, rot_dim)
        write_kv(k, v, kv, token_pages, token_offsets)
        return q
    return module.rotate_and_write(
        q, k, v, positions, cos, sin, rot_dim, kv, token_pages, token_offsets
    )
