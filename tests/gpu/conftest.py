"""Tests of the CUDA path: skipped, with the reason, where there is no CUDA device."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device is present")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
