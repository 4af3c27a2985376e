"""Linear layers whose weights are arranged once for the machine they run on."""

from tandem.ops.linear.packed import PackedLinear

__all__ = ["PackedLinear"]
