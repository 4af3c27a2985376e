"""Paged attention against softmax per query in float64, between pages of other owners."""

import pytest
import torch

from tandem.ops.attention.reference import paged_attention, write_kv
from tests.tolerances import assert_close
from tests.unit.ops.arena import GarbageArena

HEAD_DIM = 12


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Batch:
    """Sequences of `contexts` tokens in shuffled pages; the last `lengths` are queried now."""

    def __init__(self, lengths, contexts, page_tokens, heads, kv_heads, dtype):
        num_pages = [-(-context // page_tokens) for context in contexts]
        total = sum(num_pages)
        order = torch.randperm(2 * total + 1, generator=torch.Generator().manual_seed(1))
        self.arena = GarbageArena(2 * total + 1, (kv_heads, 2, page_tokens, HEAD_DIM), dtype)
        # Entries beyond the context name no page at all.
        self.page_table = torch.full((len(contexts), max(num_pages) + 2), 1 << 30).int()
        self.k, self.v, self.used = [], [], []
        for row, (context, count) in enumerate(zip(contexts, num_pages, strict=True)):
            pages = order[len(self.used) : len(self.used) + count]
            self.used += pages.tolist()
            self.page_table[row, :count] = pages
            self.k.append(randn(context, kv_heads, HEAD_DIM, seed=10 * row).to(dtype))
            self.v.append(randn(context, kv_heads, HEAD_DIM, seed=10 * row + 1).to(dtype))
            position = torch.arange(context)
            where = pages[position // page_tokens], position % page_tokens
            write_kv(self.k[-1], self.v[-1], self.arena.view, *where)
        self.q = randn(sum(lengths), heads, HEAD_DIM, seed=7).to(dtype)
        self.lengths, self.contexts = lengths, contexts
        self.query_start = torch.tensor([0, *lengths]).cumsum(0).int()
        self.context_lens = torch.tensor(contexts).int()

    def run(self, num_decode, scale=0.3, window=None, softcap=None):
        return paged_attention(
            self.q, self.arena.view, self.page_table, self.query_start, self.context_lens,
            scale, num_decode, window, softcap,
        )  # fmt: skip

    def loop(self, scale=0.3, window=None, softcap=None):
        out, t = torch.zeros_like(self.q, dtype=torch.float64), 0
        repeat = self.q.shape[1] // self.k[0].shape[1]
        for row, (length, context) in enumerate(zip(self.lengths, self.contexts, strict=True)):
            for i in range(length):
                seen = context - length + i + 1
                first = 0 if window is None else max(0, seen - window)
                for head in range(self.q.shape[1]):
                    keys = self.k[row][first:seen, head // repeat].double()
                    values = self.v[row][first:seen, head // repeat].double()
                    scores = keys @ self.q[t, head].double() * scale
                    if softcap is not None:
                        scores = softcap * (scores / softcap).tanh()
                    out[t, head] = scores.softmax(0) @ values
                t += 1
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "contexts", "num_decode"),
    [
        ([1], [1], 1),
        ([1], [1], 0),
        ([63], [63], 0),
        ([17], [40], 0),  # a chunk that continues
        ([1, 1, 1], [1, 33, 16], 3),
        ([1, 1, 5, 0, 7, 1], [9, 32, 5, 20, 31, 1], 2),
        ([0, 3], [4, 3], 0),
    ],
    ids=str,
)
def test_attention_equals_softmax_per_query(lengths, contexts, num_decode, dtype):
    batch = Batch(lengths, contexts, page_tokens=16, heads=6, kv_heads=2, dtype=dtype)
    out = batch.run(num_decode)
    assert out.dtype == dtype
    assert_close(out, batch.loop())


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 1), (6, 3)])
@pytest.mark.parametrize("page_tokens", [1, 5, 64])
def test_any_grouping_and_page_size(heads, kv_heads, page_tokens):
    batch = Batch([1, 1, 6], [11, 5, 10], page_tokens, heads, kv_heads, torch.float32)
    assert_close(batch.run(num_decode=2), batch.loop())


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [1, 4, 8, 9, 30])
def test_a_window_is_the_last_tokens_alone(window, softcap):
    batch = Batch([1, 1, 1, 6, 20], [11, 8, 40, 33, 20], 8, 6, 2, torch.float32)
    limits = {"window": window, "softcap": softcap}
    assert_close(batch.run(num_decode=3, **limits), batch.loop(**limits))
    assert_close(batch.run(num_decode=0, **limits), batch.loop(**limits))


def test_pages_in_front_of_every_window_are_not_looked_at():
    batch = Batch([1, 6], [40, 33], 8, 6, 2, torch.float32)
    expected = batch.loop(window=9)
    batch.page_table[0, :3] = batch.page_table[1, :2] = 1 << 30
    assert_close(batch.run(num_decode=1, window=9), expected)


def test_scores_are_capped():
    batch = Batch([1, 5], [11, 9], 8, 4, 2, torch.float32)
    assert_close(batch.run(num_decode=1, softcap=0.5), batch.loop(softcap=0.5))


def test_decode_rows_equal_prefill_of_one_token():
    batch = Batch([1, 1], [20, 7], 8, 4, 2, torch.float32)
    assert_close(batch.run(num_decode=2), batch.run(num_decode=0).double())


def test_result_does_not_depend_on_the_other_rows():
    batch = Batch([1, 1, 4], [40, 3, 9], 8, 4, 2, torch.float32)
    alone = Batch([1], [40], 8, 4, 2, torch.float32)
    alone.q = batch.q[:1]
    assert_close(batch.run(num_decode=2)[:1], alone.run(num_decode=1).double())


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cut", [1, 7, 8, 9, 16, 19])
def test_two_chunks_equal_one(cut, window):
    whole = Batch([20], [20], 8, 4, 2, torch.float32)
    expected = whole.run(num_decode=0, window=window)
    parts = []
    for length, context in ((cut, cut), (20 - cut, 20)):
        whole.query_start = torch.tensor([0, length]).int()
        whole.context_lens = torch.tensor([context]).int()
        q, whole.q = whole.q, whole.q[context - length : context]
        parts.append(whole.run(num_decode=0, window=window))
        whole.q = q
    assert_close(torch.cat(parts), expected.double())


def test_write_touches_its_rows_alone():
    arena = GarbageArena(4, (2, 2, 8, HEAD_DIM), torch.bfloat16)
    k, v = randn(3, 2, HEAD_DIM).bfloat16(), randn(3, 2, HEAD_DIM, seed=1).bfloat16()
    write_kv(k, v, arena.view, torch.tensor([2, 2, 0]), torch.tensor([6, 7, 0]))

    for token, (page, offset) in enumerate([(2, 6), (2, 7), (0, 0)]):
        assert torch.equal(arena.view[page, :, 0, offset], k[token])
        assert torch.equal(arena.view[page, :, 1, offset], v[token])
    assert int((~arena.view.isnan()).sum()) == k.numel() + v.numel()


def test_empty_batch_returns_an_empty_tensor():
    kv = torch.zeros(1, 2, 2, 8, HEAD_DIM)
    out = paged_attention(
        torch.zeros(0, 4, HEAD_DIM), kv, torch.zeros(0, 1).int(), torch.zeros(1).int(),
        torch.zeros(0).int(), 1.0, 0,
    )  # fmt: skip
    assert out.shape == (0, 4, HEAD_DIM)
