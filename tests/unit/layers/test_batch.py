import torch

from tandem.layers.batch import ForwardBatch


def batch(lengths: list[int], num_decode: int) -> ForwardBatch:
    num_tokens, num_rows = sum(lengths), len(lengths)
    query_start = torch.tensor([0, *lengths]).cumsum(0).int()
    return ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.arange(num_tokens),
        query_start=query_start,
        context_lens=torch.tensor(lengths).int(),
        page_table=torch.zeros(num_rows, 1).int(),
        slots=torch.arange(num_rows) + 10,
        has_state=torch.arange(num_rows) < num_decode + 1,
        token_pages=torch.zeros(num_tokens, dtype=torch.int64),
        token_offsets=torch.arange(num_tokens),
        num_decode=num_decode,
        state={},
    )


def test_prefill_rows_are_counted_from_behind_the_decode_rows() -> None:
    mixed = batch([1, 1, 5, 0, 2], num_decode=2)
    assert (mixed.num_tokens, mixed.num_rows) == (9, 5)
    assert mixed.decode_slots.tolist() == [10, 11]
    assert mixed.prefill_slots.tolist() == [12, 13, 14]
    assert mixed.prefill_query_start.tolist() == [0, 5, 5, 7]
    assert mixed.prefill_query_start.dtype is torch.int32
    assert mixed.prefill_has_state.tolist() == [True, False, False]


def test_halves_may_be_empty() -> None:
    assert batch([1, 1], num_decode=2).prefill_query_start.tolist() == [0]
    only_prefill = batch([3, 4], num_decode=0)
    assert only_prefill.decode_slots.tolist() == []
    assert only_prefill.prefill_query_start.tolist() == [0, 3, 7]
