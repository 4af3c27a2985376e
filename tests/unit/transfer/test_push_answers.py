import msgspec
import pytest

from tandem.errors import HandshakeError
from tandem.transfer import push_answers
from tandem.transfer.agent_local import LocalAgent, LocalFabric
from tandem.transfer.passive import PassiveRank
from tandem.transfer.protocol import MoveEvent, PushReply, PushRequest, PushStop
from tandem.transfer.push_answers import PushAnswers
from tandem.transfer.push_board import PushBoard
from tests.unit.transfer.memory import build_rank, hybrid
from tests.unit.transfer.peers import identity

READER = ("D", "d1")


def request(sequence=1, part=0, reader=READER) -> PushRequest:
    return PushRequest(sequence, "t", "g1", reader, "p", part, 0, 0, 16, (3,), None)


@pytest.fixture(scope="module")
def info():
    return PassiveRank(LocalAgent(LocalFabric()), build_rank(hybrid(), 1, 0, 16, 4).layout).info


@pytest.fixture
def answers(info):
    found = PushAnswers(PushBoard())
    found.meet(identity(engine_id="D", generation="d1"), [info])
    return found


def test_an_answer_comes_when_the_part_has_ended_and_to_the_last_question(answers, info):
    board = answers._board
    assert answers.ask(b"old connection", request(1)) is None
    assert answers.ask(b"new connection", request(2)) is None
    assert list(answers.due()) == []
    (order,) = board.take()
    assert order.reader.ranks == (info,)
    done = MoveEvent("p", "done")
    board.settle(order.key, done)
    assert list(answers.due()) == [(b"new connection", PushReply(2, done))]
    assert list(answers.due()) == []
    assert answers.ask(b"new connection", request(3)) == PushReply(3, done)


def test_a_stop_is_answered_at_its_end_whoever_asks(answers):
    board = answers._board
    answers.ask(b"d", request(1))
    assert answers.ask(b"d", PushStop(2, "g1", READER, "p")) is None
    drained = MoveEvent("p", "drained")
    board.settle((*READER, "p"), drained)
    assert (b"d", PushReply(2, drained)) in answers.due()
    # One that was never met too: it may have been forgotten since.
    unknown = answers.ask(b"x", PushStop(4, "g1", ("E", "e1"), "q"))
    assert unknown == PushReply(4, MoveEvent("q", "drained"))


def test_nobody_waits_for_a_part_of_a_stopped_push(answers):
    board = answers._board
    answers.ask(b"d", request(1))
    answers.ask(b"d", PushStop(2, "g1", READER, "p"))
    answers.ask(b"d", request(3))  # a late copy
    drained = MoveEvent("p", "drained")
    board.settle((*READER, "p"), drained)
    over = MoveEvent("p", "failed", error="the push is over")
    told = [reply for _, reply in answers.due()]
    assert told == [PushReply(3, over), PushReply(2, drained)]
    assert answers._waiting == {}


def test_who_has_not_said_hello_is_not_written_to(answers):
    with pytest.raises(HandshakeError, match=r"decode engine D \(generation d2\) has not said"):
        answers.ask(b"d", request(reader=("D", "d2")))
    assert answers._board.take() == []


def test_layouts_that_contradict_themselves_are_refused_and_not_remembered(answers, info):
    lying = msgspec.structs.replace(info, rank=1)
    with pytest.raises(HandshakeError, match="decode engine E rank 0 publishes rank=1"):
        answers.meet(identity(engine_id="E", generation="e1"), [lying])
    with pytest.raises(HandshakeError, match="has not said hello"):
        answers.ask(b"e", request(reader=("E", "e1")))


def test_readers_are_forgotten_longest_silent_first(answers, info, monkeypatch):
    monkeypatch.setattr(push_answers, "_MAX_READERS", 2)
    answers.meet(identity(engine_id="E", generation="e1"), [info])
    answers.ask(b"d", request())
    answers.meet(identity(engine_id="F", generation="f1"), [info])
    answers.ask(b"d", request(part=1))
    with pytest.raises(HandshakeError, match="decode engine E"):
        answers.ask(b"e", request(reader=("E", "e1")))
