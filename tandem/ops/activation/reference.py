"""Activations of MLPs and experts in plain torch, in the dtype of their argument."""

import torch
import torch.nn.functional as F


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2. Source: So et al. 2021, arXiv:2109.08668."""
    return F.relu(x).square()


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 I], the gate in the first half → [..., I].

    Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul(gate_up: torch.Tensor, is_tanh: bool = False) -> torch.Tensor:
    """gelu(gate) * up of [..., 2 I], the gate in the first half → [..., I].

    `is_tanh`: gelu by tanh, which is not quite the same.

    Source: Shazeer 2020, arXiv:2002.05202 (GEGLU); Hendrycks & Gimpel 2016, arXiv:1606.08415.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh" if is_tanh else "none") * up
