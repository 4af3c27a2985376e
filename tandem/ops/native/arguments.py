"""What the `cpu.py` of every op asks of a tensor before it passes its address."""

import torch

from tandem.ops.native.library import DTYPE_CODE, load


def is_plain(x: torch.Tensor) -> bool:
    """A CPU tensor of a dtype the kernels know, outside of any graph, and the kernels are there."""
    return (
        x.is_cpu
        and x.dtype in DTYPE_CODE
        and not (x.requires_grad and torch.is_grad_enabled())
        and load() is not None
    )


def as_fp32(x: torch.Tensor) -> torch.Tensor:
    """x itself where it is fp32 and contiguous, as parameters of a loaded model are."""
    if x.dtype is torch.float32 and x.is_contiguous():
        return x
    return x.float().contiguous()


def as_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """([rows, channels] of [..., channels] with contiguous channels, elements from row to row)."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1 and rows.shape[1] != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)
