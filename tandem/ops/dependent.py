"""Kernels that start before the one in front of them has ended.

In a chain of short kernels, most of the time goes by while one drains and the next one starts. A
kernel that is launched as dependent (programmatic dependent launch, compute capability 9.0 and
later) may start as soon as every program of the kernel in front has said that it may. What it does
before `wait_for_inputs` runs beside that kernel and must touch nothing that a kernel writes: it may
ask for weights. Behind `wait_for_inputs` everything that was launched before is complete, because
every kernel waits, whether or not it has inputs to wait for.

Imports Triton, so only the `triton.py` files import it.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Set by the bench alone, to time a chain without overlap.
is_enabled = True


def dependent(device: torch.device, *, is_early: bool = True) -> dict[str, Any]:
    """Arguments of a launch whose kernel calls `wait_for_inputs(IS_DEPENDENT)`.

    is_early: it may start before the kernel in front has ended; if not, it still lets the next one.
    """
    if not (is_enabled and _is_supported(device)):
        return {"IS_DEPENDENT": False}
    return {"IS_DEPENDENT": True, "launch_pdl": is_early}


@cache
def _is_supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def allow_next(IS_DEPENDENT: tl.constexpr):
    """The kernel behind this one may start; it still waits for all of this one's results."""
    if IS_DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(IS_DEPENDENT: tl.constexpr):
    """Returns when all kernels in front are complete; before it, only constants may be read."""
    if IS_DEPENDENT:
        gdc_wait()


@triton.jit
def begin(IS_DEPENDENT: tl.constexpr):
    """First line of a kernel that has nothing to do before its inputs are there."""
    allow_next(IS_DEPENDENT)
    wait_for_inputs(IS_DEPENDENT)
