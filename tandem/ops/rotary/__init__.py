"""Rotary position embedding: the tables, and their application to queries and keys."""

from tandem.ops.rotary.reference import apply_rotary, rotary_tables

__all__ = ["apply_rotary", "rotary_tables"]
