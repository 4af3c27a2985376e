import pytest

from tandem.errors import CapacityError, RequestError
from tandem.scheduler.policy import (
    CapacityRow,
    Finish,
    capacity_table,
    check_request,
    finish_of,
)
from tandem.state.arena import build_geometry
from tests.unit.scheduler.fake import EOS, make_request, make_scheduler, make_ticket


def finish(output: list[int], max_tokens: int | None = 8, max_model_len: int = 256, **sampling):
    request = make_request("a", 10, max_tokens, max_model_len=max_model_len, **sampling)
    request.output_token_ids = output
    return finish_of(request)


def test_a_request_without_output_is_not_finished():
    assert finish([]) is None


@pytest.mark.parametrize(
    ("output", "sampling", "expected"),
    [
        ([5, EOS], {}, Finish("stop", EOS)),
        ([5, EOS], {"ignore_eos": True}, None),
        ([5, 9], {"stop_token_ids": (9,)}, Finish("stop", 9)),
        ([5, 9], {"stop_token_ids": (9,), "ignore_eos": True}, Finish("stop", 9)),
        ([9, 5], {"stop_token_ids": (9,)}, None),
        ([EOS], {"min_tokens": 1}, None),
        ([5, EOS], {"min_tokens": 1}, Finish("stop", EOS)),
        ([5, 9], {"min_tokens": 2, "stop_token_ids": (9,)}, None),
        ([5] * 8, {}, Finish("length")),
        ([5] * 7 + [EOS], {}, Finish("stop", EOS)),
        ([5] * 7, {}, None),
    ],
)
def test_finish_rules(output, sampling, expected):
    assert finish(output, **sampling) == expected


def test_without_max_tokens_the_models_length_ends_it():
    assert finish([5] * 9, max_tokens=None, max_model_len=20) is None
    assert finish([5] * 10, max_tokens=None, max_model_len=20) == Finish("length")


def test_missing_max_tokens_is_not_zero():
    request = make_request("a", 10, None, max_model_len=64)
    assert request.max_total_tokens == 64


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prompt": []}, "no tokens"),
        ({"prompt": 64}, "has 64 tokens; the limit is 63"),
        ({"prompt": 65}, "limit is 63"),
        ({"prompt": 60, "max_tokens": 5}, "exceed the engine's limit of 64"),
        ({"prompt": 4, "max_tokens": 2, "generated": (5, 5, 5)}, "leave no room"),
    ],
)
def test_what_can_never_run_is_refused_with_its_limit(change, match):
    scheduler = make_scheduler(max_model_len=64)
    arguments = {"prompt": 4, "max_tokens": 4, "max_model_len": 64} | change
    with pytest.raises(RequestError, match=match):
        scheduler.add(make_request("a", **arguments))
    assert not scheduler.has_work()


def test_the_longest_request_is_accepted():
    scheduler = make_scheduler(max_model_len=64)
    scheduler.add(make_request("a", 63, None, max_model_len=64))
    scheduler.add(make_request("b", 60, 4, max_model_len=64))
    assert scheduler.counts().waiting == 2


def test_a_request_that_the_empty_arena_cannot_hold_is_refused():
    # 3 slabs of 4 pages, one for the slot: 8 pages, 128 tokens; the last token is never fed.
    cache = make_scheduler(num_slabs=3).cache
    check_request(make_request("a", 29, 100), max_model_len=256, cache=cache)
    with pytest.raises(CapacityError, match="129 tokens"):
        check_request(make_request("a", 30, 100), max_model_len=256, cache=cache)
    # A held prefill keeps its prompt only.
    check_request(make_request("a", 100, 100, hold=True), max_model_len=256, cache=cache)
    with pytest.raises(CapacityError):
        check_request(make_request("a", 129, 1, hold=True), max_model_len=256, cache=cache)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hold": True}, "not both"),
        ({"prompt": [5, 6]}, "covers 3 tokens, the prompt has 2"),
        ({"generated": (1000,)}, "first_token"),
    ],
)
def test_a_ticket_must_fit_its_request(change, match):
    scheduler = make_scheduler()
    ticket = make_ticket([5, 6, 7])
    with pytest.raises(RequestError, match=match):
        scheduler.add(make_request("a", **({"prompt": [5, 6, 7], "ticket": ticket} | change)))


def test_a_held_prefill_has_nothing_generated_before():
    """Its ticket would count fewer tokens than its state holds."""
    with pytest.raises(RequestError, match="counts those of the prompt alone"):
        make_scheduler().add(make_request("a", [5, 6, 7], 9, hold=True, generated=(8,)))


def test_an_id_is_bounded():
    make_scheduler().add(make_request("x" * 256, [5, 6, 7]))
    with pytest.raises(RequestError, match="257 characters; expected at most 256"):
        make_request("x" * 257, [5, 6, 7])


def test_capacity_table_counts_pages_slots_and_slab_borders():
    geometry = build_geometry(page_tokens=16, page_nbytes=256, slot_nbytes=1024, num_slabs=10)
    assert capacity_table(geometry, 8, (1, 16, 64, 65, 128, 999)) == [
        CapacityRow(1, 8, "max_num_seqs"),  # 8 slots and 8 pages in 2 slabs
        CapacityRow(16, 8, "max_num_seqs"),
        CapacityRow(64, 5, "memory"),
        CapacityRow(65, 4, "memory"),  # 5 pages each: 20 in 5 slabs, 4 slots
        CapacityRow(128, 3, "memory"),
        CapacityRow(999, 0, "memory"),
    ]
