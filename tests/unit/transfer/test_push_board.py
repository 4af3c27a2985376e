import msgspec
import pytest

from tandem.errors import TransferError
from tandem.transfer import push_board
from tandem.transfer.identity import current_process
from tandem.transfer.layout import PeerInfo
from tandem.transfer.protocol import MoveEvent, PushRequest
from tandem.transfer.push_board import PushBoard

READER = PeerInfo("D", "d1", "", current_process(), ())
OTHER = PeerInfo("D", "d2", "", current_process(), ())


def request(part=0, push_id="p", **changes) -> PushRequest:
    fields = {
        "sequence": 1,
        "ticket_id": "t",
        "generation": "g",
        "reader": READER.key,
        "push_id": push_id,
        "part": part,
        "attempt": 0,
        "start_token": 0,
        "stop_token": 16,
        "dst_pages": (3,),
        "dst_slot": None,
    }
    return PushRequest(**{**fields, **changes})


def test_a_question_that_comes_twice_is_one_order_and_gets_one_answer():
    board = PushBoard()
    assert board.ask(READER, request()) is None
    assert board.ask(READER, request(sequence=2)) is None
    (order,) = board.take()
    assert (order.reader, order.request) == (READER, request())
    assert board.take() == []
    done = MoveEvent("p", "done", nbytes=7)
    board.settle(order.key, done)
    assert board.ask(READER, request(sequence=3)) == done
    assert board.end_of(order.key, 0) == done
    assert board.take() == []


def test_pushes_of_two_readers_with_one_id_are_two():
    board = PushBoard()
    board.ask(READER, request())
    board.ask(OTHER, request())
    first, second = board.take()
    board.settle(first.key, MoveEvent("p", "done"))
    assert board.end_of(second.key, 0) is None


def test_a_stop_is_answered_when_the_core_has_ended_the_push():
    board = PushBoard()
    board.ask(READER, request(0))
    board.ask(READER, request(1))
    key = board.take()[0].key
    board.settle(key, MoveEvent("p", "failed", part=0, has_transport_failed=True))
    assert board.stop(READER.key, "p") is None
    assert board.stop(READER.key, "p") is None
    (order,) = board.take()
    assert (order.key, order.request) == (key, None)
    board.settle(key, MoveEvent("p", "drained"))
    # What any part met counts for all of its memory.
    end = MoveEvent("p", "drained", has_transport_failed=True)
    assert board.stop(READER.key, "p") == end
    assert board.end_of(key, None) == end


def test_a_part_that_comes_after_its_stop_is_never_ordered():
    """The pages that it names may be another request's by then."""
    board = PushBoard()
    assert board.stop(READER.key, "p") == MoveEvent("p", "drained")
    event = board.ask(READER, request())
    assert event is not None
    assert (event.status, event.error) == ("failed", "the push is over")
    assert board.take() == []


def test_pushes_that_are_over_are_forgotten_oldest_first(monkeypatch):
    monkeypatch.setattr(push_board, "MAX_PUSHES", 3)
    board = PushBoard()
    for index in range(6):
        board.ask(READER, request(push_id=f"p{index}"))
        if index:  # the first goes on
            board.settle((*READER.key, f"p{index}"), MoveEvent(f"p{index}", "done"))
    assert len(board._pushes) == 3
    assert next(iter(board._pushes))[2] == "p0"
    assert board.end_of((*READER.key, "p5"), 0).status == "done"
    assert board.end_of((*READER.key, "p0"), 0) is None
    assert board.end_of((*READER.key, "p1"), 0).error == "the push is over"
    assert board.end_of((*READER.key, "p1"), None) == MoveEvent("p1", "drained")


def test_parts_that_go_on_are_bounded_and_come_free_again(monkeypatch):
    monkeypatch.setattr(push_board, "MAX_OPEN_PARTS", 3)
    board = PushBoard()
    for part in range(3):
        board.ask(READER, request(part))
    with pytest.raises(TransferError, match="3 parts are being written already"):
        board.ask(READER, request(0, "q"))
    key = board.take()[0].key
    board.settle(key, MoveEvent("p", "done", part=1))
    assert board.ask(READER, request(0, "q")) is None
    board.stop(READER.key, "p")
    board.settle(key, MoveEvent("p", "drained"))
    for part in range(1, 3):
        assert board.ask(READER, request(part, "q")) is None
    with pytest.raises(TransferError):
        board.ask(READER, request(3, "q"))


def test_the_side_channel_is_called_at_each_end():
    board, calls = PushBoard(), []
    board.on_change = lambda: calls.append("change")
    board.ask(READER, request())
    key = board.take()[0].key
    assert calls == []
    board.settle(key, MoveEvent("p", "done"))
    board.stop(READER.key, "p")
    assert calls == ["change"]
    board.settle(key, MoveEvent("p", "drained"))
    assert calls == ["change", "change"]


def test_sizes_of_a_push_are_bounded_while_decoding():
    decoder = msgspec.msgpack.Decoder(PushRequest)
    for changes in ({"part": 1 << 16}, {"dst_pages": (-1,)}, {"dst_slot": 2**31}, {"attempt": -1}):
        data = msgspec.msgpack.encode(request(**changes))
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(data)
