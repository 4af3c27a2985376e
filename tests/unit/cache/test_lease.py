import itertools
import random
import threading

import pytest

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
    table.grant("t", "memory")
    clock.now += 4
    assert table.check("t") == 6.0
    assert table.next_end() == 110.0


def test_released_when_the_last_rank_is_done(table):
    table.grant("t", "memory")
    assert not table.release("t", 0, 2)
    assert table.collect() == []
    assert table.release("t", 1, 2)
    assert table.collect() == ["memory"]
    assert table.collect() == []
    with pytest.raises(LeaseError, match="has ended"):
        table.check("t")


def test_expires_without_a_reader(table, clock):
    table.grant("t", "memory")
    clock.now += 9.99
    assert table.expire() == []
    clock.now += 0.01
    with pytest.raises(LeaseError, match="after 10"):
        table.check("t")  # even before anybody sweeps
    with pytest.raises(LeaseError):
        table.renew("t")
    assert table.expire() == ["t"]
    assert table.collect() == ["memory"]
    assert table.next_end() is None


def test_renewed_lease_outlives_its_neighbours(table, clock):
    table.grant("a", "A")
    table.grant("b", "B")
    clock.now += 6
    assert table.renew("a") == 10.0
    clock.now += 6
    assert table.expire() == ["b"]
    assert table.check("a") == 4.0
    clock.now += 4
    assert table.expire() == ["a"]


def test_note_that_arrives_after_the_deadline_but_before_the_sweep_counts_as_release(table, clock):
    table.grant("t", "memory")
    clock.now += 11
    assert table.release("t", 0, 1)
    assert table.expire() == []
    assert table.collect() == ["memory"]
    assert table.counts().released == 1


def test_early_notes_are_kept_and_matched(table):
    assert not table.release("t", 0, 2)
    assert not table.release("t", 0, 2)
    table.grant("t", "memory")
    assert table.release("t", 1, 2)
    assert table.collect() == ["memory"]
    counts = table.counts()
    assert (counts.early, counts.duplicate, counts.released) == (1, 1, 1)


def test_complete_early_notes_end_the_lease_at_its_grant(table):
    table.release("t", 1, 2)
    table.release("t", 0, 2)
    table.grant("t", "memory")
    assert table.collect() == ["memory"]


def test_duplicates_and_late_notes_change_nothing(table):
    table.grant("t", "memory")
    for _ in range(3):
        table.release("t", 0, 2)
    assert table.collect() == []
    table.release("t", 1, 2)
    assert not table.release("t", 1, 2)
    assert table.collect() == ["memory"]
    assert table.counts().duplicate == 3


def test_malformed_notes_are_counted_and_ignored(table):
    table.grant("t", "memory")
    for rank, num_readers in ((2, 2), (-1, 2), (0, 0)):
        assert not table.release("t", rank, num_readers)
    table.release("t", 0, 2)
    assert not table.release("t", 1, 4)  # another count than before
    assert table.counts().malformed == 4
    assert table.collect() == []


def test_unknown_notes_are_counted_and_forgotten(table, clock):
    table.release("never", 0, 1)
    clock.now += 10
    table.expire()
    assert table.counts().unknown == 1
    table.grant("never", "memory")
    assert table.collect() == []


def test_early_notes_are_bounded(table, monkeypatch):
    monkeypatch.setattr(lease_module, "MAX_EARLY", 3)
    for index in range(10):
        table.release(f"t{index}", 0, 1)
    assert table.counts().unknown == 7
    table.grant("t9", "memory")
    assert table.collect() == ["memory"]


def test_tickets_whose_ids_are_prefixes_of_each_other_stay_apart(table):
    table.grant("req-1", "one")
    table.grant("req-11", "eleven")
    assert table.release("req-11", 0, 1)
    assert table.collect() == ["eleven"]
    assert table.check("req-1") == 10.0


def test_revoke_ends_a_lease_once(table):
    table.grant("t", "memory")
    assert table.revoke("t")
    assert not table.revoke("t")
    assert table.collect() == ["memory"]
    assert table.counts().revoked == 1


def test_unknown_ticket_is_refused(table):
    with pytest.raises(LeaseError, match="never granted"):
        table.check("t")


def test_every_payload_is_collected_once_under_threads():
    table: LeaseTable[int] = LeaseTable(lease_s=0.02)
    num_tickets, num_readers = 200, 2
    collected: list[int] = []
    done = threading.Event()

    def notes(rank: int) -> None:
        order = list(range(num_tickets))
        random.Random(rank).shuffle(order)
        for index in order:
            table.release(str(index), rank, num_readers)

    def sweep() -> None:
        while not done.is_set():
            table.expire()
            collected.extend(table.collect())

    threads = [threading.Thread(target=notes, args=(rank,)) for rank in range(num_readers)]
    sweeper = threading.Thread(target=sweep)
    for thread in (*threads, sweeper):
        thread.start()
    for index in range(num_tickets):
        table.grant(str(index), index)
    for thread in threads:
        thread.join()
    for _ in itertools.count():
        if table.counts().active == 0:
            break
    done.set()
    sweeper.join()
    collected.extend(table.collect())
    assert sorted(collected) == list(range(num_tickets))
