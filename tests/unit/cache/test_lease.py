import itertools
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache import lease as lease_module
from tandem.cache.lease import LeaseTable
from tandem.errors import LeaseError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> LeaseTable[str]:
    return LeaseTable(clock, lease_s=10.0)


def test_check_tells_what_is_left(table, clock):
    assert table.grant("t")
    clock.now += 4
    assert table.check("t") == 6.0


def test_a_release_ends_a_ticket_that_nobody_else_reads(table):
    assert table.grant("t")
    assert table.release("t", "r")
    assert table.collect() == ["t"]
    assert table.collect() == []
    with pytest.raises(LeaseError, match="has ended"):
        table.check("t")


def test_expires_without_a_reader(table, clock):
    assert table.grant("t")
    clock.now += 9.99
    assert table.expire() == []
    clock.now += 0.01
    with pytest.raises(LeaseError, match="after 10"):
        table.check("t")  # even before anybody sweeps
    with pytest.raises(LeaseError):
        table.renew("t", "r")
    assert table.expire() == ["t"]
    assert table.collect() == ["t"]
    assert table.counts().active == 0


def test_renewed_lease_outlives_its_neighbours(table, clock):
    assert table.grant("a")
    assert table.grant("b")
    clock.now += 6
    assert table.renew("a", "r") == 10.0
    clock.now += 6
    assert table.expire() == ["b"]
    assert table.check("a") == 4.0
    clock.now += 4
    assert table.expire() == ["a"]


def test_note_that_arrives_after_the_deadline_but_before_the_sweep_counts_as_release(table, clock):
    assert table.grant("t")
    clock.now += 11
    assert table.release("t", "r")
    assert table.expire() == []
    assert table.collect() == ["t"]
    assert table.counts().released == 1


def test_a_ticket_that_was_given_back_before_it_came_is_not_begun(table):
    assert not table.release("t", "r")
    assert not table.release("t", "r")
    assert not table.register("t")
    table.revoke("u")
    assert not table.register("u")
    assert table.collect() == []
    counts = table.counts()
    assert (counts.computing, counts.active, counts.released, counts.revoked) == (0, 0, 1, 1)
    assert (counts.early, counts.duplicate) == (2, 1)
    # Only that one: an id may come again.
    assert table.register("u")


@pytest.mark.parametrize("end", ["release", "revoke"])
def test_a_ticket_that_is_given_back_while_it_is_computed_gets_no_lease(table, end):
    changes = []
    table.on_change = lambda: changes.append(table.counts().computing)
    assert table.register("t", "queued")
    assert table.news("t") == "queued"
    assert table.release("t", "r") if end == "release" else table.revoke("t")
    assert changes == [0]
    assert table.collect() == ["t"]
    assert not table.grant("t")
    assert table.collect() == []
    with pytest.raises(LeaseError, match="has ended"):
        table.news("t")
    assert not table.revoke("t")
    assert table.counts().granted == 0


def test_time_runs_from_the_grant_and_news_go_on_until_the_end(table, clock):
    changes = []
    table.on_change = lambda: changes.append(1)
    assert table.news("t") is None
    table.register("t", "queued")
    clock.now += 1000
    assert table.expire() == []
    with pytest.raises(LeaseError, match="never granted"):
        table.renew("t", "r")
    table.publish("t", "half")
    assert table.news("t") == "half"
    table.grant("t", "all")
    assert table.news("t") == "all"
    assert len(changes) == 2
    table.publish("t", "late")
    assert table.news("t") == "all"
    assert table.check("t") == 10.0


def test_a_withdrawn_ticket_has_ended_and_leaves_nothing_to_collect(table):
    table.register("t")
    table.withdraw("t")
    table.withdraw("t")
    assert table.collect() == []
    with pytest.raises(LeaseError, match="has ended"):
        table.news("t")


def test_duplicates_and_late_notes_change_nothing(table):
    assert table.grant("t")
    table.renew("t", "d")
    table.renew("t", "r")
    for _ in range(3):
        assert not table.release("t", "r")
    assert table.collect() == []
    assert table.release("t", "d")
    assert not table.release("t", "r")
    assert table.collect() == ["t"]
    assert table.counts().duplicate == 3


def test_unknown_notes_are_counted_and_forgotten(table, clock):
    table.release("never", "r")
    clock.now += 10
    table.expire()
    assert table.counts().unknown == 1
    assert table.grant("never")
    assert table.collect() == []


def test_early_notes_are_bounded(table, monkeypatch):
    monkeypatch.setattr(lease_module, "MAX_EARLY", 3)
    for index in range(10):
        table.release(f"t{index}", "r")
    assert table.counts().unknown == 7
    assert table.register("t6")
    assert not table.register("t7")


def test_tickets_whose_ids_are_prefixes_of_each_other_stay_apart(table):
    assert table.grant("req-1")
    assert table.grant("req-11")
    assert table.release("req-11", "r")
    assert table.collect() == ["req-11"]
    assert table.check("req-1") == 10.0


def test_revoke_ends_a_lease_once(table):
    assert table.grant("t")
    assert table.revoke("t")
    assert not table.revoke("t")
    assert table.collect() == ["t"]
    assert table.counts().revoked == 1


def test_a_ticket_ends_with_its_last_reader(table):
    """A note says that its own reader is done, and nothing about another's lease."""
    assert table.grant("t")
    table.renew("t", "d1")
    table.renew("t", "d2")
    assert not table.release("t", "d1")
    assert not table.release("t", "d1")
    assert not table.release("t", "stranger")
    assert table.collect() == []
    table.renew("t", "d2")
    assert table.release("t", "d2")
    assert table.collect() == ["t"]
    assert table.counts().released == 1


def test_a_reader_that_is_silent_costs_its_own_lease_alone(table, clock):
    assert table.grant("t")
    assert table.grant("other")
    table.renew("t", "silent")
    clock.now += 4
    table.renew("t", "d")
    assert not table.release("t", "d")
    # The ticket ends with the silent one's lease now, before that of a ticket granted later.
    clock.now += 2
    assert table.grant("later")
    clock.now = 110.0
    assert sorted(table.expire()) == ["other", "t"]
    assert table.counts().expired == 2


def test_who_has_let_its_lease_go_by_does_not_end_another_ones(table, clock):
    assert table.grant("t")
    table.renew("t", "slow")
    clock.now += 6
    table.renew("t", "d")
    clock.now += 6
    assert table.expire() == []
    assert not table.release("t", "slow")
    assert table.check("t") == 4.0
    assert table.release("t", "d")


def test_a_reader_that_has_released_is_refused(table):
    assert table.grant("t")
    table.renew("t", "d1")
    table.renew("t", "d2")
    table.release("t", "d2")
    with pytest.raises(LeaseError, match="has released"):
        table.renew("t", "d2")
    table.release("t", "d1")
    for ask in (table.renew, table.follow):
        with pytest.raises(LeaseError, match="has ended"):
            ask("t", "d3")


def test_a_revoked_ticket_admits_nobody_and_waits_for_its_readers(table, clock):
    assert table.grant("t", "all")
    assert table.follow("t", "d") == "all"
    assert not table.revoke("t")
    for ask in (table.renew, table.follow):
        with pytest.raises(LeaseError, match="ended for new readers"):
            ask("t", "d2")
    clock.now += 6
    table.renew("t", "d")
    clock.now += 6
    assert table.expire() == []
    assert table.release("t", "d")
    assert table.collect() == ["t"]
    assert table.counts().revoked == 1


def test_a_follower_has_a_lease_with_the_final_news_and_not_before(table):
    table.register("t", "queued")
    assert table.follow("t", "d1") == "queued"
    assert table.follow("unknown", "d1") is None
    table.grant("t", "all")
    assert table.follow("t", "d2") == "all"
    assert not table.release("t", "d1")
    assert table.release("t", "d2")
    with pytest.raises(LeaseError, match="has ended"):
        table.follow("t", "d1")


def test_another_record_is_refused_and_leaves_no_reader(table):
    assert table.grant("t", record="as it was")
    with pytest.raises(LeaseError, match="not the one that was granted"):
        table.renew("t", "forger", "as it was not")
    assert table.release("t", "anybody")


def test_readers_are_bounded(table, monkeypatch):
    monkeypatch.setattr(lease_module, "MAX_READERS", 2)
    assert table.grant("t")
    table.renew("t", "d1")
    table.release("t", "stranger")
    table.release("t", "other stranger")
    assert table.counts().surplus == 1
    with pytest.raises(LeaseError, match="has 2 readers"):
        table.renew("t", "d2")
    table.renew("t", "d1")


_readers = st.sampled_from("abc")
_actions = st.one_of(
    st.tuples(st.just("renew"), _readers),
    st.tuples(st.just("follow"), _readers),
    st.tuples(st.just("release"), _readers),
    st.tuples(st.just("revoke"), st.none()),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 4.0, 9.0])),
)


@given(actions=st.lists(_actions, max_size=30))
def test_memory_is_kept_exactly_as_long_as_somebody_may_read_it(actions):
    """Against a model that knows each reader's lease by the answers that it got."""
    clock = Clock()
    table: LeaseTable[str] = LeaseTable(clock, lease_s=10.0)
    assert table.grant("t", "all")
    ends: dict[str, float] = {}  # of leases that were answered and not released
    released: set[str] = set()
    had_reader = is_given_back = is_over = False
    for action, value in actions:
        if action in ("renew", "follow"):
            may_read = not is_over and value not in released
            may_read = may_read and (not is_given_back or value in ends)
            try:
                getattr(table, action)("t", value)
            except LeaseError:
                assert not may_read
            else:
                assert may_read
                ends[value] = clock.now + 10.0
                had_reader = True
        elif action == "release":
            table.release("t", value)
            released.add(value)
            # Who never had a lease gives the ticket back only if nobody else had one either.
            is_given_back = is_given_back or not had_reader
            ends.pop(value, None)
        elif action == "revoke":
            table.revoke("t")
            is_given_back = True
        else:
            clock.now += value
        table.expire()
        is_kept = any(end > clock.now for end in ends.values())
        is_waiting = not had_reader and not is_given_back and clock.now < 110.0
        is_over = is_over or not (is_kept or is_waiting)
        assert (table.counts().active == 0) == is_over
    assert table.collect() == (["t"] if is_over else [])


def test_unknown_ticket_is_refused(table):
    with pytest.raises(LeaseError, match="never granted"):
        table.check("t")


def test_every_ticket_is_collected_once_under_threads():
    table: LeaseTable[str] = LeaseTable(lease_s=0.02)
    num_tickets, num_readers = 200, 2
    collected: list[str] = []
    done = threading.Event()

    def notes(number: int) -> None:
        order = list(range(num_tickets))
        random.Random(number).shuffle(order)
        for index in order:
            table.release(str(index), f"r{number}")

    def sweep() -> None:
        while not done.is_set():
            table.expire()
            collected.extend(table.collect())

    threads = [threading.Thread(target=notes, args=(number,)) for number in range(num_readers)]
    sweeper = threading.Thread(target=sweep)
    for thread in (*threads, sweeper):
        thread.start()
    for index in range(num_tickets):
        if not table.grant(str(index)):
            collected.append(str(index))  # given back before it came
    for thread in threads:
        thread.join()
    for _ in itertools.count():
        if table.counts().active == 0:
            break
    done.set()
    sweeper.join()
    collected.extend(table.collect())
    assert sorted(map(int, collected)) == list(range(num_tickets))
