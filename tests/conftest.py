"""Settings of all tests."""

import os

import torch
from hypothesis import settings

# Times vary on shared machines; pytest-timeout catches what hangs.
settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")

if not torch.cuda.is_available():
    # Read when a kernel is declared: before any test imports one.
    os.environ["TRITON_INTERPRET"] = "1"
