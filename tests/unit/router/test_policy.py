from hypothesis import given
from hypothesis import strategies as st

from tandem.router.policy import Candidate, Load, Standing, choose


def candidate(url, *, role="decode", requests=0, tokens=0, turn=0, reason=None):
    return Candidate(url, role, Standing(3, reason), Load(requests, tokens, turn))


def test_prefill_goes_where_fewest_tokens_wait_and_decode_where_fewest_sequences_run():
    loads = {"a": (1, 900), "b": (3, 30)}
    for role, expected in (("prefill", "b"), ("decode", "a")):
        candidates = [
            candidate(url, role=role, requests=requests, tokens=tokens)
            for url, (requests, tokens) in loads.items()
        ]
        assert choose(candidates, set()) == expected


def test_equals_take_turns():
    candidates = [candidate(url) for url in "abc"]
    chosen = []
    for _ in range(6):
        url = choose(candidates, set())
        chosen.append(url)
        load = next(each.load for each in candidates if each.url == url)
        load.add(5)
        load.remove(5)
    assert chosen == list("abcabc")


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99), st.booleans()), max_size=5),
    st.sets(st.integers(0, 4)),
)
def test_choice_is_usable_untried_and_no_other_is_lighter(loads, tried):
    candidates = [
        candidate(str(place), requests=requests, tokens=tokens, reason=None if ok else "down")
        for place, (requests, tokens, ok) in enumerate(loads)
    ]
    url = choose(candidates, {str(place) for place in tried})
    free = [
        (requests, tokens, place)
        for place, (requests, tokens, ok) in enumerate(loads)
        if ok and place not in tried
    ]
    if not free:
        assert url is None
    else:
        assert loads[int(url)][:2] == min(free)[:2]
        assert int(url) not in tried


def test_a_lost_request_stops_use_until_a_probe_is_answered():
    standing = Standing(3)
    assert not standing.is_usable
    standing.answered(None)
    assert standing.is_usable
    standing.lost_request("reset")
    assert (standing.is_usable, standing.is_dead) == (False, False)
    standing.answered(None)
    assert standing.is_usable
    standing.answered("draining")
    assert (standing.is_usable, standing.reason) == (False, "draining")


def test_an_engine_is_dead_after_missed_probes_in_a_row():
    standing = Standing(3)
    for answered, is_dead in (
        (0, False),
        (0, False),
        (1, False),
        (0, False),
        (0, False),
        (0, True),
    ):
        standing.answered(None) if answered else standing.missed("silent")
        assert standing.is_dead == is_dead
