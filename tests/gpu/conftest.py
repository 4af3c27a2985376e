"""Tests of the CUDA path: skipped, with the reason, where there is no CUDA device."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    num_devices = torch.cuda.device_count()
    none = pytest.mark.skip(reason="no CUDA device is present")
    one = pytest.mark.skip(reason="fewer than two CUDA devices are present")
    for item in items:
        if item.get_closest_marker("gpu") and num_devices == 0:
            item.add_marker(none)
        elif item.get_closest_marker("multi_gpu") and num_devices < 2:
            item.add_marker(one)
