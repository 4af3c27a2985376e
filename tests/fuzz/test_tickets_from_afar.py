"""Tickets that anyone may have changed, brought to a decode engine with valid requests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.engine.engine import EngineCore
from tandem.errors import TandemError
from tandem.state.ticket import Ticket
from tandem.transfer import agent_nixl
from tandem.transfer.agent_local import LocalAgent, LocalFabric
from tests.equivalence.engines import build_core, greedy, request, run, wait_until_idle
from tests.tiny_models import save_tiny

PROMPT = list(range(5, 40))
Pair = tuple[EngineCore, EngineCore]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two engines of this process, which move bytes by copying them."""
    folder: Path = save_tiny("nemotron_h", tmp_path_factory.mktemp("afar") / "tiny")
    fabric = LocalFabric()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_nixl, "NixlAgent", lambda name: LocalAgent(fabric, name))
        options = {"arena_mib": 4, "max_num_seqs": 4}
        prefill = build_core(folder, role="prefill", **options)
        decode = build_core(folder, role="decode", deadline_s=0.5, **options)
    yield prefill, decode
    decode.close()
    prefill.close()


_NUMBERS = st.integers(0, 40) | st.sampled_from([-1, 2**16, 2**31 - 1, 2**31, 2**63, 2**64 - 1])
_FLOATS = st.floats(-10, 10) | st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e300])
_TEXTS = st.text(max_size=20) | st.sampled_from(["x" * 512, "x" * 513])
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "ticket_id": _TEXTS,
    "engine_id": _TEXTS,
    "generation": _TEXTS,
    "address": _TEXTS | st.sampled_from(["tcp://127.0.0.1:1", "ipc:///tmp/x", "tcp://*:9"]),
    "lease_s": _FLOATS,
    "num_tokens": _NUMBERS | st.just(len(PROMPT)),
    "prompt_digest": _TEXTS,
    "pages": st.lists(_NUMBERS, max_size=6),
    "slot": st.none() | _NUMBERS,
    "page_tokens": _NUMBERS,
    "first_token": _NUMBERS,
    "first_logprob": st.none()
    | st.tuples(_FLOATS, st.lists(st.tuples(_NUMBERS, _FLOATS), max_size=3)),
}


def held(prefill: EngineCore, name: str) -> dict[str, Any]:
    ((output),) = run(prefill, [request(name, PROMPT, greedy(4, logprobs=2), hold=True)])
    assert output.ticket is not None
    return msgspec.structs.asdict(output.ticket)


def check(pair: Pair, changes: dict[str, Any], name: str) -> None:
    """Refused, or answered, with nothing left behind; and the next one is answered."""
    prefill, decode = pair
    fields = held(prefill, f"{name}-p")
    ours = fields["ticket_id"]
    raw = msgspec.msgpack.encode({**fields, **changes})
    try:
        ticket = msgspec.msgpack.decode(raw, type=Ticket)
        item = request(name, PROMPT, greedy(4, logprobs=2), ticket=ticket)
        (output,) = run(decode, [item])
    except (msgspec.ValidationError, TandemError):
        pass
    else:
        assert output.finish_reason == "length"
        assert len(output.token_ids) == 4
    prefill.release_ticket(ours)
    wait_until_idle(prefill, decode)
    assert decode.stats()["transfer_num_crashed"] == 0
    good = msgspec.convert(held(prefill, f"{name}-q"), Ticket)
    before = decode.stats()["transfer_num_done"]
    (output,) = run(decode, [request(f"{name}-g", PROMPT, greedy(4), ticket=good)])
    assert output.finish_reason == "length"
    assert decode.stats()["transfer_num_done"] == before + 1
    wait_until_idle(prefill, decode)


@pytest.mark.parametrize(
    "changes",
    [
        {"page_tokens": 0},
        {"page_tokens": 1},
        {"pages": [], "slot": None},
        {"pages": []},
        {"slot": None},
        {"pages": [2**31 - 1] * 3},
        {"slot": 2**31 - 1},
    ],
    ids=str,
)
def test_a_ticket_that_lies_about_its_state_costs_its_own_read_alone(
    pair: Pair, changes: dict[str, Any]
) -> None:
    check(pair, changes, f"lie-{changes}")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_ticket_ends_a_decode_engine(pair: Pair, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(_FIELDS)), min_size=1, unique=True))
    changes = {name: data.draw(_FIELDS[name], name) for name in names[:2]}
    check(pair, changes, f"fuzz-{data.draw(st.uuids())}")
