"""Engines that may not exchange state find out at the hello, whichever of them is the odd one."""

from dataclasses import replace

import msgspec
import pytest

from tandem.cache.lease import LeaseTable
from tandem.state.ticket import record_of
from tandem.transfer.agent_local import LocalAgent, LocalFabric
from tandem.transfer.identity import build_model_identity
from tandem.transfer.passive import PassiveRank
from tandem.transfer.ticket_client import TicketClient
from tandem.transfer.ticket_server import TicketServer
from tests.unit.state.layouts import attention, mamba2, model
from tests.unit.transfer.memory import build_rank
from tests.unit.transfer.peers import identity, wait_for
from tests.unit.transfer.test_ticket_channel import ticket_for

MAMBA, ATTENTION = mamba2(4, 2), attention(2, 4)
BASE = model((ATTENTION,), (MAMBA,))


def base(**changes):
    return build_model_identity(BASE, weights="a1b2", **changes)


def other(config, weights="a1b2"):
    return build_model_identity(config, weights=weights)


# name -> (a model that is not BASE, the field, BASE's value, its value)
CASES = {
    "kv dtype": (
        other(model((ATTENTION,), (MAMBA,), dtype="float16")),
        "layer 0 attention.kv dtype",
        "bfloat16",
        "float16",
    ),
    "state dtype": (
        other(model((ATTENTION,), (MAMBA,), state_dtype="bfloat16")),
        "layer 1 mamba2.ssm dtype",
        "float32",
        "bfloat16",
    ),
    "layer order": (
        other(model((MAMBA,), (ATTENTION,))),
        "layer order",
        "attention.kv in layer 0",
        "mamba2.conv.x in layer 0",
    ),
    "head dim": (
        other(model((attention(2, 8),), (MAMBA,))),
        "layer 0 attention.kv unit_shape",
        "(2, 4)",
        "(2, 8)",
    ),
    "heads": (
        other(model((attention(4, 4),), (MAMBA,))),
        "layer 0 attention.kv units",
        "2",
        "4",
    ),
    "number of layers": (
        other(model((ATTENTION,), (MAMBA,), (MAMBA,))),
        "number of layers",
        "2",
        "3",
    ),
    "conv width": (
        other(model((ATTENTION,), (mamba2(4, 2, conv_kernel=3),))),
        "layer 1 mamba2.conv.x unit_shape",
        "(2, 3)",
        "(2, 2)",
    ),
    "vocabulary": (other(replace(BASE, vocab_size=32)), "vocab_size", "16", "32"),
    "other shapes": (
        other(replace(BASE, digest="d2")),
        "digest of the model's shapes",
        "tiny",
        "d2",
    ),
    "speculative settings": (base(speculative="2 tokens"), "speculative", "none", "2 tokens"),
    "weights": (other(BASE, weights="c3d4"), "digest of the weights", "a1b2", "c3d4"),
}


@pytest.fixture
def ask():
    """ask(prefill's model, decode's model): the event of one ticket."""
    opened = []

    def ask(prefill, decode):
        source = PassiveRank(LocalAgent(LocalFabric()), build_rank(BASE, 1, 0, 16, 4).layout)
        leases = LeaseTable(lease_s=5.0)
        leases.grant("t1", record=record_of(ticket_for("anywhere")))
        ours, theirs = (
            msgspec.structs.replace(identity(BASE, name), model=found)
            for name, found in (("P", prefill), ("D", decode))
        )
        server = TicketServer("127.0.0.1", 0, ours, [source.info], leases)
        opened.append(server)
        client = TicketClient(theirs, deadline_s=10.0)
        opened.append(client)
        client.open("r", ticket_for(server.address))
        (event,) = wait_for(client.poll, 15.0)
        return event

    yield ask
    for item in reversed(opened):
        item.close()


@pytest.mark.parametrize("is_decode_odd", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_difference_is_refused_by_field_and_both_values(ask, name, is_decode_odd):
    odd, field, usual, value = CASES[name]
    event = ask(base(), odd) if is_decode_odd else ask(odd, base())
    prefill, decode = (usual, value) if is_decode_odd else (value, usual)
    assert (event.status, event.peer) == ("failed", None)
    assert (
        f"{field} is {prefill} on the prefill engine and {decode} on the decode engine"
        in event.error
    )


def test_equal_engines_are_not_refused(ask):
    assert ask(base(), base()).status == "open"
