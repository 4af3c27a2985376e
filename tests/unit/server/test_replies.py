"""Chunks as they are sent: the written-once frame says what the chunk says."""

import json

import pytest

from tandem.engine.outputs import OutputDelta, OutputToken
from tandem.server.replies import ChatFormat, CompletionFormat, Prompt
from tests.unit.server.fakes import logprob_of
from tests.unit.tokenizers import byte_level

TEXTS = ["a", "", 'quotes " and \\ and \n', "日本語 😀", '"text":"', "\x00text", "end"]


def form(kind, **more):
    return kind(
        reply_id="r",
        model='a "text":"" model',
        tokenizer=byte_level(),
        prompts=[Prompt(None, [1]), Prompt(None, [2])],
        num_answers=1,
        **more,
    )


def decoded(event):
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[6:])


@pytest.mark.parametrize("kind", [CompletionFormat, ChatFormat])
@pytest.mark.parametrize(
    "more", [{}, {"has_usage": True}, {"has_logprobs": True}, {"has_token_ids": True}]
)
def test_events_hold_what_chunks_hold(kind, more):
    events, chunks = form(kind, **more), form(kind, **more)
    for place, text in enumerate(TEXTS):
        for index in (0, 1):
            reason = "length" if place == len(TEXTS) - 1 else None
            tokens = (OutputToken(40 + place, place, logprob_of(40 + place, place)),)
            delta = OutputDelta(text, tokens, finish_reason=reason)
            event, chunk = events.event(index, delta), chunks.chunk(index, delta)
            assert (event is None) == (chunk is None)
            if event is not None:
                assert decoded(event) == chunk | {"created": events.created}


@pytest.mark.parametrize("kind", [CompletionFormat, ChatFormat])
def test_an_answer_of_one_chunk_is_first_and_last(kind):
    delta = OutputDelta("all", (OutputToken(4, 0),), finish_reason="stop")
    choice = decoded(form(kind).event(0, delta))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "all" in (choice.get("text"), choice.get("delta", {}).get("content"))
