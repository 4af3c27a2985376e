"""Everything that crosses a process border comes out as it went in."""

import msgspec
import pytest

from tandem import errors
from tandem.config.args import build_config
from tandem.engine import messages
from tandem.engine.messages import Failure
from tandem.engine.transfer_watch import TransferReport
from tandem.scheduler.request import EngineRequest, SamplingParams, TokenDelta
from tandem.scheduler.step import Chunk, NewRequest, Sample, StepPlan, StepResult
from tandem.state.ticket import Ticket, TokenLogprob
from tandem.transfer.identity import current_process
from tandem.transfer.layout import PeerInfo, RankInfo
from tandem.transfer.protocol import MoveCommand, MoveEvent
from tests.unit.transfer.memory import build_rank, hybrid

LOGPROB = TokenLogprob(-1.5, ((3, -1.5), (4, -9999.0)))
TICKET = Ticket(
    ticket_id="t",
    engine_id="P",
    generation="g",
    address="tcp://127.0.0.1:1",
    num_tokens=20,
    prompt_digest="d",
    pages=(5, 6),
    slot=None,
    page_tokens=16,
    first_token=7,
    first_logprob=LOGPROB,
    lease_s=30.0,
)
# Every field differs from its default.
SAMPLING = SamplingParams(
    n=2,
    temperature=0.5,
    top_p=0.9,
    top_k=4,
    min_p=0.1,
    seed=2**64 - 1,
    presence_penalty=1.0,
    frequency_penalty=-1.0,
    repetition_penalty=1.5,
    logit_bias={3: -100.0, 70000: 5.5},
    max_tokens=None,
    min_tokens=2,
    stop=("a", "\u65e5\u672c"),
    stop_token_ids=(1, 2),
    include_stop_str_in_output=True,
    ignore_eos=True,
    logprobs=5,
    skip_special_tokens=False,
)
REQUEST = EngineRequest(
    request_id="r",
    prompt_token_ids=[1, 2, 3],
    sampling=SAMPLING,
    hold=True,
    ticket=TICKET,
    generated=[7],
)
DELTA = TokenDelta(
    request_id="r",
    token_ids=[7, 8],
    logprobs=[LOGPROB, LOGPROB],
    finish_reason="hold",
    stop_token_id=1,
    error="e",
    ticket=TICKET,
    num_prompt_tokens=3,
)
PLAN = StepPlan(
    step_id=5,
    forget=["a"],
    new_requests=[NewRequest("r", [1, 2], [3], SAMPLING)],
    chunks=[Chunk("r", 2, [3], 1, 0, [4, 5], True)],
    num_decode=1,
)
RANK = RankInfo(
    0, "agent", b"\x00\xff", build_rank(hybrid(), 1, 0, 16, 4).layout, current_process()
)
CONFIG = build_config(
    "some/model", {"tp": 2, "role": "prefill", "arena_mib": 3, "dtype": "float32"}
)

TO_CORE = [
    messages.Submit(REQUEST),
    messages.Abort("r"),
    messages.ReleaseTicket("t"),
    messages.FlushCache(),
    messages.DebugQuery(3),
    messages.DetailQuery(4, True),
]
TO_FRONTEND = [
    messages.EngineInfo("e", "m", 512, 4096, (1, 2), "prefill", "tcp://h:1", "g", 30.0, True, 2),
    Failure("RequestError", "no", "prompt"),
    messages.Deltas([DELTA, TokenDelta(request_id="s", token_ids=[])]),
    messages.Refused("r", Failure("CapacityError", "full")),
    messages.Heartbeat({"steps_total": 3.0, "is_idle": 1.0}, "why", 4),
    messages.Detail(4, [{"request_id": "r"}], TransferReport(failures={"deadline": 1})),
]
TO_RANK = [
    messages.Execute(PLAN),
    messages.PostMove(
        PeerInfo("P", "g", "tcp://127.0.0.1:1", current_process(), (RANK,)),
        MoveCommand("r", ("P", "g"), 1, 16, 20, (5, 6), None, (7, 8), 3),
    ),
    messages.Collect(),
    messages.GiveUp("r"),
    messages.PollMoves(),
]
FROM_RANK = [
    messages.RankReady(1, RANK),
    messages.RankReady(1, None),
    messages.RankReply(
        StepResult(5, [Sample("r", 9, LOGPROB)]),
        [MoveEvent("r", "failed", "why", True, 5, 6, 3, 0.5, 7)],
    ),
    messages.RankReply(None, []),
    Failure("TandemError", "broken"),
]


@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        (messages.ToCore, TO_CORE),
        (messages.ToFrontend, TO_FRONTEND),
        (messages.ToRank, TO_RANK),
        (messages.FromRank, FROM_RANK),
    ],
    ids=["to core", "to frontend", "to rank", "from rank"],
)
def test_messages_survive_the_wire(kind: object, examples: list[msgspec.Struct]) -> None:
    decoder = msgspec.msgpack.Decoder(kind)
    for message in examples:
        assert decoder.decode(msgspec.msgpack.encode(message)) == message
    # None was forgotten.
    assert {type(message) for message in examples} == set(kind.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "settings",
    [
        messages.CoreSettings(CONFIG, "ipc:///tmp/x", "DEBUG"),
        messages.RankSettings(CONFIG, 1, "ipc:///tmp/x", "file:///tmp/s", 9, "e", None),
    ],
    ids=["core", "rank"],
)
def test_settings_survive_the_life_line(settings: msgspec.Struct) -> None:
    line = msgspec.json.encode(settings)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=type(settings)) == settings


@pytest.mark.parametrize(
    "kind",
    [
        errors.CapacityError,
        errors.ConfigError,
        errors.EngineDeadError,
        errors.LeaseError,
        errors.ModelError,
        errors.RequestError,
        errors.ShardingError,
        errors.TransferError,
    ],
)
def test_an_error_arrives_as_what_it_was(kind: type[errors.TandemError]) -> None:
    error = Failure.of(kind("what happened")).error()
    assert type(error) is kind
    assert str(error) == "what happened"


def test_a_refusal_keeps_the_name_of_its_parameter() -> None:
    error = Failure.of(errors.RequestError("too long", "max_tokens")).error()
    assert isinstance(error, errors.RequestError)
    assert error.param == "max_tokens"


def test_an_error_of_another_kind_arrives_as_its_nearest_ancestor() -> None:
    assert type(Failure.of(errors.HandshakeError("x")).error()) is errors.TransferError
    lost = Failure.of(ZeroDivisionError("by zero")).error()
    assert type(lost) is errors.EngineDeadError
    assert str(lost) == "ZeroDivisionError: by zero"
