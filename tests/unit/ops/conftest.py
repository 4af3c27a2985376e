import pytest
import torch

from tandem.ops.native import load


@pytest.fixture
def native():
    """The library of native kernels; a machine without a compiler skips what needs it."""
    library = load()
    if library is None:
        pytest.skip("no native kernels on this machine")
    return library


@pytest.fixture(params=[1, 2])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def far_slots():
    """`make(shape, dtype)`: a view [3, *shape] whose slots lie 3 GiB apart, beyond 32-bit offsets.

    Only the pages of memory that are touched exist.
    """

    def make(shape, dtype):
        stride = (3 << 30) // dtype.itemsize
        numel = torch.Size(shape).numel()
        buffer = torch.empty(2 * stride + numel, dtype=dtype)
        inner = torch.empty(shape, device="meta").stride()
        return buffer.as_strided((3, *shape), (stride, *inner))

    return make
