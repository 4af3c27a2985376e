"""Loads the compiled kernels and declares their C signatures.

Pointers travel as integers and strides in elements, all of 64 bits. Nothing here checks shapes:
the `cpu.py` of each op does, before it passes an address.
"""

import ctypes
import os
from functools import cache

import torch

from tandem.log import get_logger
from tandem.ops.native.build import NativeBuildError, build_library

log = get_logger(__name__)

DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# p: pointer, i: int64, f: float; the letter before the colon is the result (- for none).
_SIGNATURES = {
    "tandem_linear_packed_numel": "i:ii",
    "tandem_has_bf16_dot": "i:",
    "tandem_advise_huge_pages": "-:pi",
    "tandem_linear_pack": "-:pipii",
    "tandem_linear_rows": "-:pppii",
    "tandem_ssd_update": "-:pff",
    "tandem_ssd_prefill": "-:pffppi",
    "tandem_selective_scan_update": "-:p",
    "tandem_selective_scan_prefill": "-:ppp",
    "tandem_delta_update": "-:p",
    "tandem_delta_prefill": "-:ppp",
    "tandem_rms_norm": "-:iipipipppiif",
    "tandem_gated_rms_norm": "-:iipipippiiif",
    "tandem_silu_mul": "-:ipipii",
    "tandem_relu2": "-:ippi",
    "tandem_conv1d": "-:p",
    "tandem_attention_decode": "-:iipppppiiiiiiiifii",
    "tandem_write_kv": "-:ipppppiiiiiiiii",
}
_SIGNATURES_BF16_DOT = {"tandem_linear_bf16": "-:pipppiiii"}
_CTYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "-": None}


@cache
def load() -> ctypes.CDLL | None:
    """The library, compiled at the first call; None, with one warning, where that is impossible."""
    try:
        return open_library(str(build_library()))
    except (NativeBuildError, OSError) as error:
        log.warning("no native CPU kernels, the slower torch path is used: %s", error)
        return None


def kernels() -> ctypes.CDLL:
    """The library, for code that runs only where `load` has found it."""
    library = load()
    assert library is not None, "a native path was chosen without its library"
    return library


def advise_huge_pages(memory: torch.Tensor) -> None:
    """Ask for huge pages under a CPU tensor that has not been touched yet; only a hint."""
    library = load()
    if library is not None and memory.is_cpu:
        library.tandem_advise_huge_pages(memory.data_ptr(), memory.numel() * memory.element_size())


def open_library(path: str) -> ctypes.CDLL:
    """The library at `path` with the signatures of its functions declared; raises OSError."""
    library = ctypes.CDLL(path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
    _declare(library, _SIGNATURES)
    if library.tandem_has_bf16_dot():
        _declare(library, _SIGNATURES_BF16_DOT)
    return library


def _declare(library: ctypes.CDLL, signatures: dict[str, str]) -> None:
    for name, signature in signatures.items():
        result, _, arguments = signature.partition(":")
        function = getattr(library, name)
        function.restype = _CTYPES[result]
        function.argtypes = [_CTYPES[letter] for letter in arguments]
