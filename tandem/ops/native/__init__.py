"""Native CPU kernels: C++ compiled at first use, called with plain addresses.

`python -m tandem.ops.native` compiles ahead of time. Which op uses a kernel is decided in the
`cpu.py` of that op.
"""

from tandem.ops.native.build import NativeBuildError, build_library
from tandem.ops.native.library import DTYPE_CODE, advise_huge_pages, kernels, load, open_library

__all__ = [
    "DTYPE_CODE",
    "NativeBuildError",
    "advise_huge_pages",
    "build_library",
    "kernels",
    "load",
    "open_library",
]
