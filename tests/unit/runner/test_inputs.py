"""Batches say what their plan says, from tables that plans extend."""

import pytest
import torch

from tandem.layers.batch import ForwardBatch
from tandem.runner.inputs import InputBuilder, forward_batch
from tandem.runner.sampling_table import SamplingTable
from tandem.runner.staging import Staging
from tandem.scheduler.request import SamplingParams
from tandem.scheduler.step import PENDING_TOKEN, Chunk, NewRequest, StepPlan

PAGE_TOKENS = 8
SAMPLING = SamplingParams(temperature=0, seed=1)


@pytest.fixture
def builder() -> InputBuilder:
    return InputBuilder(PAGE_TOKENS, SamplingTable(50, (2,), torch.device("cpu")))


def new(request_id: str, **fields: object) -> NewRequest:
    values = {"prompt_token_ids": [1], "generated": [], "sampling": SAMPLING, **fields}
    return NewRequest(request_id, **values)


def chunk(
    request_id: str,
    start: int,
    token_ids: list[int],
    *,
    slot: int = 0,
    first_page: int = 0,
    pages: list[int] | None = None,
    sample: bool = False,
) -> Chunk:
    return Chunk(request_id, start, token_ids, slot, first_page, pages or [], sample)


def apply(
    builder: InputBuilder,
    chunks: list[Chunk],
    num_decode: int = 0,
    new_requests: tuple[NewRequest, ...] = (),
    forget: tuple[str, ...] = (),
) -> ForwardBatch:
    plan = StepPlan(0, list(forget), list(new_requests), chunks, num_decode)
    builder.apply(plan)
    host = builder.build(plan.chunks, num_decode)
    return forward_batch(Staging(torch.device("cpu")).send(host.arrays()), num_decode, {})


def test_a_mixed_batch_is_laid_out_row_after_row(builder: InputBuilder) -> None:
    apply(
        builder,
        [chunk("a", 0, list(range(17)), slot=4, pages=[10, 3, 7])],
        new_requests=(new("a"),),
    )
    batch = apply(
        builder,
        [
            chunk("a", 17, [50], slot=4),
            chunk("b", 0, [60, 61, 62], slot=2, pages=[5]),
            chunk("c", 0, [70], slot=9, pages=[1]),
        ],
        num_decode=1,
        new_requests=(new("b"), new("c")),
    )
    assert batch.token_ids.tolist() == [50, 60, 61, 62, 70]
    assert batch.positions.tolist() == [17, 0, 1, 2, 0]
    assert batch.query_start.tolist() == [0, 1, 4, 5]
    assert batch.context_lens.tolist() == [18, 3, 1]
    assert batch.page_table.tolist() == [[10, 3, 7], [5, 0, 0], [1, 0, 0]]
    assert batch.slots.tolist() == [4, 2, 9]
    # One token at the start of a sequence has no state behind it, whatever its length.
    assert batch.has_state.tolist() == [True, False, False]
    assert batch.token_pages.tolist() == [7, 5, 5, 5, 1]
    assert batch.token_offsets.tolist() == [1, 0, 1, 2, 0]
    assert batch.num_decode == 1


def test_dtypes_are_those_that_kernels_expect(builder: InputBuilder) -> None:
    batch = apply(builder, [chunk("a", 0, [1, 2], pages=[3])], new_requests=(new("a"),))
    dtypes = {
        torch.int64: ("token_ids", "positions", "slots", "token_pages", "token_offsets"),
        torch.int32: ("query_start", "context_lens", "page_table"),
        torch.bool: ("has_state",),
    }
    for dtype, names in dtypes.items():
        for name in names:
            assert getattr(batch, name).dtype == dtype, name


@pytest.mark.parametrize("num_tokens", [7, 8, 9, 15, 16, 17])
def test_tokens_around_a_page_end_go_where_they_belong(
    builder: InputBuilder, num_tokens: int
) -> None:
    pages = [20, 11, 30][: -(-num_tokens // PAGE_TOKENS)]
    batch = apply(builder, [chunk("a", 0, [1] * num_tokens, pages=pages)], new_requests=(new("a"),))
    expected = [(pages[i // PAGE_TOKENS], i % PAGE_TOKENS) for i in range(num_tokens)]
    places = zip(batch.token_pages.tolist(), batch.token_offsets.tolist(), strict=True)
    assert list(places) == expected


def test_pages_arrive_piece_by_piece_and_a_restart_rewrites_them(builder: InputBuilder) -> None:
    first = chunk("a", 0, [1] * 8, pages=[1])
    apply(builder, [first], new_requests=(new("a"),))
    pages = list(range(100, 120))
    batch = apply(builder, [chunk("a", 8, [1] * 160, first_page=1, pages=pages)])
    assert batch.page_table[0].tolist() == [1, *pages]
    # Preempted, and back with other pages.
    batch = apply(builder, [chunk("a", 0, [1] * 16, first_page=0, pages=[7, 9])])
    assert batch.page_table.tolist() == [[7, 9]]


def test_pages_beyond_the_context_are_not_shown(builder: InputBuilder) -> None:
    """Reserved for later chunks; a kernel has no business there."""
    batch = apply(builder, [chunk("a", 0, [1] * 5, pages=[4, 5, 6])], new_requests=(new("a"),))
    assert batch.page_table.tolist() == [[4]]


def test_a_model_without_attention_has_no_pages(builder: InputBuilder) -> None:
    batch = apply(builder, [chunk("a", 0, [1] * 9, slot=3)], new_requests=(new("a"),))
    assert batch.context_lens.tolist() == [9]
    assert batch.slots.tolist() == [3]


def test_what_is_forgotten_is_unknown_and_may_come_anew(builder: InputBuilder) -> None:
    apply(builder, [chunk("a", 0, [1] * 20, pages=[1, 8, 9])], new_requests=(new("a"),))
    # Forgotten and announced again in one plan: the new one counts, and takes over the row.
    batch = apply(
        builder,
        [chunk("a", 0, [1], pages=[2]), chunk("b", 0, [3], pages=[4])],
        new_requests=(new("a"), new("b")),
        forget=("a", "never known"),
    )
    assert batch.page_table.tolist() == [[2], [4]]
    builder.apply(StepPlan(1, ["a"], [], [], 0))
    with pytest.raises(KeyError):
        builder.build([chunk("a", 1, [1])], 1)


def test_many_requests_keep_their_own_pages(builder: InputBuilder) -> None:
    """More than the tables begin with, some gone in between."""
    names = [f"r{index}" for index in range(100)]
    chunks = [chunk(name, 0, [index], pages=[1000 + index]) for index, name in enumerate(names)]
    apply(builder, chunks, new_requests=tuple(map(new, names)))
    gone = tuple(names[::3])
    more = [f"s{index}" for index in range(40)]
    late = [chunk(name, 0, [7], pages=[5000 + index]) for index, name in enumerate(more)]
    apply(builder, late, new_requests=tuple(map(new, more)), forget=gone)
    left = [name for name in names if name not in gone]
    batch = apply(builder, [chunk(name, 1, [9]) for name in left], num_decode=len(left))
    assert batch.page_table.flatten().tolist() == [1000 + int(name[1:]) for name in left]
    batch = apply(builder, [chunk(name, 1, [9]) for name in more], num_decode=len(more))
    assert batch.page_table.flatten().tolist() == [5000 + index for index in range(40)]


def test_a_pending_token_is_the_one_that_the_step_before_sampled(builder: InputBuilder) -> None:
    apply(
        builder,
        [chunk(name, 0, [1, 2], pages=[3]) for name in "abc"],
        new_requests=tuple(map(new, "abc")),
    )
    first = builder.build([chunk(name, 0, [1, 2]) for name in "cab"], 0)
    builder.plan_sampling(first.rows)
    chunks = [chunk("a", 2, [PENDING_TOKEN]), chunk("c", 2, [40]), chunk("b", 2, [PENDING_TOKEN])]
    host = builder.build(chunks, 3)
    tensors = Staging(torch.device("cpu")).send(host.arrays())
    sampled = torch.tensor([30, 10, 20])  # of c, a, b
    assert forward_batch(tensors, 3, {}, sampled).token_ids.tolist() == [10, 40, 20]
    # Sampled again for others: what "a" had is no longer there.
    builder.plan_sampling(host.rows[1:])
    with pytest.raises(AssertionError, match="not just sampled"):
        builder.build(chunks[:1], 1)
