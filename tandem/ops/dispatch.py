"""Which implementation of an op runs: the one of its folder for the device, or the reference."""

import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType

import torch


def is_native_enabled() -> bool:
    """False under `TANDEM_NATIVE=0`; read at each call, so that a test can switch it."""
    return os.environ.get("TANDEM_NATIVE", "1") != "0"


def choose(op: str, reference: ModuleType, x: torch.Tensor) -> ModuleType:
    """`tandem.ops.<op>.cpu` or `.triton`, by x's device, if it exists and supports x.

    Else `reference`. The faster path has the functions of the reference, with the same signatures,
    and a function `supports(x) -> bool` that is true when it can run and takes x.
    """
    path = "cpu" if x.is_cpu else "triton" if x.is_cuda else None
    if path is None or not is_native_enabled():
        return reference
    native = _native_module(op, path)
    return native if native is not None and native.supports(x) else reference


@cache
def _native_module(op: str, path: str) -> ModuleType | None:
    # Looked up, not tried: an op without native code has no file, but one that fails to import is
    # a bug that should be seen.
    name = f"tandem.ops.{op}.{path}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None
