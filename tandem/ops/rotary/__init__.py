"""Rotary position embedding; see `reference` and, for long contexts, `scaling`."""

from tandem.ops.rotary.reference import apply_rotary, rotary_frequencies, rotary_tables
from tandem.ops.rotary.scaling import scale_by_channels, scale_by_turns

__all__ = [
    "apply_rotary",
    "rotary_frequencies",
    "rotary_tables",
    "scale_by_channels",
    "scale_by_turns",
]
