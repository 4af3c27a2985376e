"""The native kernels: the cases of the reference again, and sizes and layouts of real models."""

import pytest
import torch

from tandem.ops.attention import cpu, reference
from tests.tolerances import assert_close
from tests.unit.ops.attention import test_reference as cases

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(autouse=True)
def _run_cases_natively(monkeypatch):
    monkeypatch.setattr(cases, "paged_attention", cpu.paged_attention)
    monkeypatch.setattr(cases, "write_kv", cpu.write_kv)


test_softmax = cases.test_attention_equals_softmax_per_query
test_grouping = cases.test_any_grouping_and_page_size
test_window = cases.test_a_window_is_the_last_tokens_alone
test_unseen_pages = cases.test_pages_in_front_of_every_window_are_not_looked_at
test_capped = cases.test_scores_are_capped
test_decode_rows = cases.test_decode_rows_equal_prefill_of_one_token
test_other_rows = cases.test_result_does_not_depend_on_the_other_rows
test_write = cases.test_write_touches_its_rows_alone
test_empty = cases.test_empty_batch_returns_an_empty_tensor


@pytest.mark.parametrize("contexts", [[1], [544], [7, 300, 33], [100] * 9], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(12, 4, 64), (8, 8, 96), (16, 1, 128), (3, 3, 33)]
)
def test_decode_equals_reference(heads, kv_heads, head_dim, contexts, num_threads):
    num_rows, pages_a_row = len(contexts), -(-max(contexts) // 64)
    kv = torch.randn(num_rows * pages_a_row, kv_heads, 2, 64, head_dim).bfloat16()
    # A query as a projection leaves it: the heads of K and V behind its own.
    q = torch.randn(num_rows, heads + 2 * kv_heads, head_dim).bfloat16()[:, :heads]
    table = torch.randperm(num_rows * pages_a_row).view(num_rows, pages_a_row).int()
    starts, context_lens = torch.arange(num_rows + 1).int(), torch.tensor(contexts).int()
    rows = (kv, table, starts, context_lens, 0.5, num_rows)
    got = cpu.paged_attention(q, *rows)
    assert_close(got, reference.paged_attention(q, *rows).double())
    narrow = cpu.paged_attention(q, *rows, window=70)
    assert_close(narrow, reference.paged_attention(q, *rows, window=70).double())
    alone = cpu.paged_attention(
        q[:1], kv, table[:1], starts[:2], context_lens[:1], scale=0.5, num_decode=1
    )
    assert torch.equal(alone[0], got[0])


def test_scores_far_apart_do_not_overflow():
    kv = torch.zeros(2, 1, 2, 16, 16)
    kv[:, :, 0] = torch.linspace(-200, 200, 32).view(2, 1, 16, 1)
    kv[:, :, 1] = torch.arange(32.0).view(2, 1, 16, 1)
    arguments = (torch.tensor([[0, 1]]).int(), torch.tensor([0, 1]), torch.tensor([32]).int())
    up = cpu.paged_attention(torch.ones(1, 1, 16), kv, *arguments, 1.0, 1)
    down = cpu.paged_attention(-torch.ones(1, 1, 16), kv, *arguments, 1.0, 1)
    assert_close(up, torch.full((1, 1, 16), 31.0).double())
    assert_close(down, torch.zeros(1, 1, 16).double())


def test_pages_beyond_32_bit_offsets(far_slots):
    kv, close = far_slots((2, 2, 8, 64), torch.bfloat16), torch.zeros(3, 2, 2, 8, 64).bfloat16()
    k, v = torch.randn(2, 2, 64).bfloat16(), torch.randn(2, 2, 64).bfloat16()
    for pages in (kv, close):
        cpu.write_kv(k, v, pages, torch.tensor([2, 1]), torch.tensor([0, 0]))
    q, table = torch.randn(2, 4, 64).bfloat16(), torch.tensor([[2], [1]]).int()
    rows = (table, torch.tensor([0, 1, 2]), torch.tensor([1, 1]).int(), 1.0, 2)
    got = cpu.paged_attention(q, kv, *rows)
    assert torch.equal(got, cpu.paged_attention(q, close, *rows))
    assert torch.equal(got[:, ::2], v)
