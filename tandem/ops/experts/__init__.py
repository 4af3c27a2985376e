"""Mixture of experts: routing, and the MLPs of the chosen experts."""

from tandem.ops.experts.reference import experts_mlp, route_sigmoid

__all__ = ["experts_mlp", "route_sigmoid"]
