"""Activations of MLPs and experts."""

from tandem.ops.activation.reference import activate, relu2, silu_mul

__all__ = ["activate", "relu2", "silu_mul"]
