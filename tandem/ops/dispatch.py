"""Which implementation of an op runs: the native CPU path of its folder, or the reference."""

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
    """`tandem.ops.<op>.cpu` if it exists and supports x, else `reference`.

    A native path has the functions of the reference, with the same signatures, and a function
    `supports(x) -> bool` that is true when its library is loaded and takes x.
    """
    if not x.is_cpu or not is_native_enabled():
        return reference
    native = _native_module(op)
    return native if native is not None and native.supports(x) else reference


@cache
def _native_module(op: str) -> ModuleType | None:
    # Looked up, not tried: an op without native code has no file, but one that fails to import is
    # a bug that should be seen.
    name = f"tandem.ops.{op}.cpu"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None
