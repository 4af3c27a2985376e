import pytest
import torch
import torch.nn.functional as F

from tandem.errors import ShapeError
from tandem.ops.linear import PackedLinear

ATOL = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def _weight(num_outputs, num_inputs, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5
    return weight.to(dtype)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 12, 13, 33, 200])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (32, 64), (50, 33), (131, 4101)])
def test_equals_the_product_in_float64(shape, num_rows, num_threads):
    weight = _weight(*shape)
    bias = torch.randn(shape[0]).bfloat16()
    x = torch.randn(num_rows, shape[1]).bfloat16()
    got = PackedLinear(weight, bias)(x)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert got.dtype is torch.bfloat16
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_and_leading_dimensions(dtype):
    weight = _weight(48, 40, dtype)
    x = torch.randn(2, 3, 40).to(dtype)
    got = PackedLinear(weight)(x)
    assert got.shape == (2, 3, 48)
    expected = F.linear(x.double(), weight.double())
    torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=ATOL[dtype])


def test_a_row_is_bitwise_the_same_in_every_batch(num_threads):
    packed = PackedLinear(_weight(70, 514))
    if not packed.is_native:
        pytest.skip("F.linear promises nothing of the kind")
    x = torch.randn(200, 514).bfloat16()
    whole = packed(x)
    for count in (1, 2, 5, 8, 11, 12, 13, 31, 64, 199):
        assert torch.equal(packed(x[:count]), whole[:count])
        assert torch.equal(packed(x[200 - count :]), whole[200 - count :])


def test_rows_of_a_wider_tensor_are_read_in_place():
    packed = PackedLinear(_weight(33, 64))
    wide = torch.full((9, 200), torch.nan, dtype=torch.bfloat16)
    wide[:, 100:164] = torch.randn(9, 64).bfloat16()
    x = wide[:, 100:164]
    assert torch.equal(packed(x), packed(x.contiguous()))
    columns = x.t().contiguous().t()  # neither axis as the kernel wants it
    assert torch.equal(packed(columns), packed(x.contiguous()))


def test_weight_may_be_a_slice_and_is_not_kept():
    wide = _weight(40, 300)
    expected = PackedLinear(wide[:, 20:150].contiguous())
    got = PackedLinear(wide[:, 20:150])
    x = torch.randn(3, 130).bfloat16()
    before = expected(x)
    wide.fill_(torch.nan)
    if got.is_native:
        assert torch.equal(got(x), before)


def test_embedding_reads_rows_of_the_weight():
    weight = _weight(77, 51)
    packed = PackedLinear(weight)
    ids = torch.tensor([[0, 76, 32], [31, 33, 64]])
    assert torch.equal(packed.embedding(ids), weight[ids])
    assert packed.embedding(ids[:0]).shape == (0, 3, 51)


def test_embedding_refuses_ids_outside():
    packed = PackedLinear(_weight(77, 51))
    with pytest.raises((ShapeError, IndexError)):
        packed.embedding(torch.tensor([0, 77]))
    with pytest.raises((ShapeError, IndexError)):
        packed.embedding(torch.tensor([-1]))


def test_native_code_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("TANDEM_NATIVE", "0")
    weight = _weight(64, 64)
    packed = PackedLinear(weight)
    assert not packed.is_native
    x = torch.randn(4, 64).bfloat16()
    assert torch.equal(packed(x), F.linear(x, weight))


def test_refuses_shapes_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"bias"):
        PackedLinear(_weight(8, 8), torch.zeros(7))
    packed = PackedLinear(_weight(8, 8))
    if packed.is_native:
        with pytest.raises(ShapeError, match=r"expected \[\.\.\., 8\]"):
            packed(torch.zeros(2, 9, dtype=torch.bfloat16))
