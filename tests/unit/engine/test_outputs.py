import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.outputs import (
    CompletionOutput,
    Detokenizer,
    OutputProcessor,
    StopMatcher,
    split_choices,
)
from tandem.scheduler.request import SamplingParams, TokenDelta
from tandem.state.ticket import TokenLogprob
from tests.unit.tokenizers import byte_fallback, byte_level

EOS = 1
any_text = st.text(
    st.one_of(st.sampled_from("abc hello stop.日本😀é\u200d"), st.characters(codec="utf-8")),
    max_size=30,
)


def run(processor, token_ids, *, sizes=(1,), reason="length", stop_token_id=None, logprobs=False):
    """Feed tokens in deltas of the given sizes; return (whole output, deltas)."""
    output = CompletionOutput(0)
    deltas = []
    place, turn = 0, 0
    while place < len(token_ids):
        size = sizes[turn % len(sizes)]
        part = token_ids[place : place + size]
        is_last = place + size >= len(token_ids)
        delta = processor.push(
            TokenDelta(
                request_id="r",
                token_ids=part,
                logprobs=[TokenLogprob(-float(t), ((t, -float(t)),)) for t in part]
                if logprobs
                else None,
                finish_reason=reason if is_last else None,
                stop_token_id=stop_token_id if is_last else None,
            )
        )
        deltas.append(delta)
        output.add(delta)
        if delta.finish_reason:
            break
        place, turn = place + size, turn + 1
    return output, deltas


def bytes_as_tokens(text):
    """One token a byte, so that every character of several bytes spans tokens."""
    tokenizer = byte_level()
    table = {tokenizer.token_bytes(i): i for i in range(330)}
    return [table[bytes([byte])] for byte in text.encode()]


@given(any_text, st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans())
@settings(max_examples=100, deadline=None)
def test_joined_text_equals_decoding_of_the_whole(text, sizes, bytewise):
    tokenizer = byte_level()
    ids = bytes_as_tokens(text) if bytewise else tokenizer.encode(text)
    output, _ = run(OutputProcessor(tokenizer, SamplingParams()), ids, sizes=sizes)
    assert output.text == tokenizer.decode(ids) == text
    assert output.token_ids == ids


@given(st.lists(st.integers(0, 329), max_size=120), st.lists(st.integers(1, 5), min_size=1))
@settings(max_examples=150, deadline=None)
def test_random_tokens_decode_as_the_whole_does(ids, sizes):
    """Random tokens hold broken characters: they show as they do in the whole text."""
    tokenizer = byte_level()
    output, _ = run(OutputProcessor(tokenizer, SamplingParams()), ids, sizes=sizes)
    assert output.text == tokenizer.decode(ids)


@given(st.integers(0, 329), st.integers(45, 110))
@settings(max_examples=40, deadline=None)
def test_long_runs_without_a_border_stay_equal_to_the_whole(token, count):
    tokenizer = byte_level()
    ids = [token] * count
    output, _ = run(OutputProcessor(tokenizer, SamplingParams()), ids)
    assert output.text == tokenizer.decode(ids)


@given(any_text)
@settings(max_examples=100, deadline=None)
def test_byte_fallback_text_has_no_replacement_character_of_its_own(text):
    tokenizer = byte_fallback()
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    output, _ = run(OutputProcessor(tokenizer, SamplingParams()), ids)
    assert output.text == whole


def test_leading_space_of_a_continuation_is_kept():
    tokenizer = byte_fallback()
    prompt = tokenizer.encode("hello", add_special_tokens=False)
    ids = tokenizer.encode("world", add_special_tokens=False)
    assert tokenizer.decode(ids) == "world"
    output, _ = run(OutputProcessor(tokenizer, SamplingParams(), prompt), ids)
    assert output.text == " world"


def test_unfinished_character_waits_and_shows_when_complete():
    detokenizer = Detokenizer(byte_level())
    assert [detokenizer.push(t) for t in bytes_as_tokens("😀x")] == ["", "", "", "😀", "x"]


def test_unfinished_character_at_the_end_is_shown_as_the_whole_text_shows_it():
    ids = bytes_as_tokens("a😀")[:-1]
    output, _ = run(OutputProcessor(byte_level(), SamplingParams()), ids)
    assert output.text == byte_level().decode(ids) == "a\ufffd"


def test_prompt_that_ends_inside_a_character_does_not_swallow_output():
    first, *rest = bytes_as_tokens("é")
    output, _ = run(OutputProcessor(byte_level(), SamplingParams(), [first]), rest)
    assert output.text == byte_level().decode(rest)


def first_stop(text, stops):
    """Brute force: (start, string) of the stop string that completes first in `text`."""
    ends = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    return min(ends)[1:] if ends else None


@given(
    st.text("abc😀", max_size=25),
    st.lists(st.text("abc😀", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_cut_at_the_first_to_complete(text, stops, sizes, bytewise, include):
    tokenizer = byte_level()
    ids = bytes_as_tokens(text) if bytewise else tokenizer.encode(text)
    sampling = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    output, deltas = run(OutputProcessor(tokenizer, sampling), ids, sizes=sizes, logprobs=True)
    found = first_stop(text, stops)
    if found is None:
        assert output.text == text
        assert output.token_ids == ids
        assert output.finish_reason == ("length" if ids else None)
    else:
        start, stop = found
        assert output.text == text[: start + len(stop) * include]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert ids[: len(output.tokens)] == output.token_ids
    # One entry a token, also when they are held back.
    assert [entry.logprob for entry in output.logprobs or []] == [
        -float(t) for t in output.token_ids
    ]
    offsets = [token.text_offset for token in output.tokens]
    assert offsets == sorted(offsets)
    assert all(offset <= len(output.text) for offset in offsets)
    # What is out at any time is a prefix of the answer.
    shown = ""
    for delta in deltas:
        shown += delta.text
        assert output.text.startswith(shown)


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=9), min_size=1))
@settings(max_examples=150, deadline=None)
def test_matcher_holds_back_exactly_what_may_complete(text, stops):
    matcher = StopMatcher(stops)
    for index, char in enumerate(text):
        found = matcher.push(char)
        seen = text[: index + 1]
        ending = [stop for stop in stops if seen.endswith(stop)]
        assert found == (max(ending, key=len) if ending else None)
        prefixes = [stop[:k] for stop in stops for k in range(len(stop))]
        assert matcher.num_held == max(len(p) for p in prefixes if seen.endswith(p))


def test_whole_output_is_the_same_however_tokens_arrive():
    tokenizer = byte_level()
    ids = tokenizer.encode("hello world 日本 stop here 😀 more")
    sampling = SamplingParams(stop=("stop here 😀",))
    outputs = [
        run(OutputProcessor(tokenizer, sampling), ids, sizes=sizes, logprobs=True)[0]
        for sizes in ((1,), (3,), (len(ids),), (2, 5))
    ]
    assert all(output == outputs[0] for output in outputs)
    assert outputs[0].text == "hello world 日本 "
    # Tokens after the one that completed the stop string were never part of the answer.
    assert len(outputs[0].tokens) < len(ids)


def test_stop_string_before_min_tokens_is_ignored():
    tokenizer = byte_level()
    ids = bytes_as_tokens("abXcdXe")
    sampling = SamplingParams(stop=("X",), min_tokens=4, max_tokens=20)
    output, _ = run(OutputProcessor(tokenizer, sampling), ids)
    assert output.text == "abXcd"


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_has_text_only_when_asked(include):
    tokenizer = byte_level()
    ids = bytes_as_tokens("abc")
    sampling = SamplingParams(stop_token_ids=(ids[-1],), include_stop_str_in_output=include)
    output, _ = run(OutputProcessor(tokenizer, sampling), ids, reason="stop", stop_token_id=ids[-1])
    assert output.text == ("abc" if include else "ab")
    assert output.token_ids == ids
    assert (output.finish_reason, output.stop_reason) == ("stop", ids[-1])


@pytest.mark.parametrize("skip", [False, True])
def test_end_of_sequence_is_counted_but_not_shown(skip):
    tokenizer = byte_level()
    ids = [*bytes_as_tokens("ab"), EOS]
    processor = OutputProcessor(tokenizer, SamplingParams(skip_special_tokens=skip))
    output, _ = run(processor, ids, reason="stop", stop_token_id=EOS)
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", None)
    assert processor.num_generated == 3


def test_special_tokens_inside_show_only_when_asked():
    ids = [*bytes_as_tokens("a"), 0, *bytes_as_tokens("b")]
    texts = [
        run(OutputProcessor(byte_level(), SamplingParams(skip_special_tokens=skip)), ids)[0].text
        for skip in (True, False)
    ]
    assert texts == ["ab", "a<s>b"]


def test_held_back_prefix_is_released_when_the_answer_ends():
    ids = bytes_as_tokens("abST")
    output, deltas = run(OutputProcessor(byte_level(), SamplingParams(stop=("STOP",))), ids)
    assert [delta.text for delta in deltas] == ["a", "b", "", "ST"]
    assert [len(delta.tokens) for delta in deltas] == [1, 1, 0, 2]
    assert output.finish_reason == "length"


def test_error_is_passed_on_and_nothing_follows_the_end():
    processor = OutputProcessor(byte_level(), SamplingParams())
    failed = processor.push(
        TokenDelta(request_id="r", token_ids=[], finish_reason="error", error="lost")
    )
    assert (failed.finish_reason, failed.error) == ("error", "lost")
    late = processor.push(TokenDelta(request_id="r", token_ids=[5]))
    assert late.is_empty


def test_choices_of_a_seeded_request_have_their_own_seeds_and_ids():
    requests = split_choices("r", [5], SamplingParams(n=3, seed=2**64 - 1))
    assert [request.request_id for request in requests] == ["r-0", "r-1", "r-2"]
    assert [request.sampling.seed for request in requests] == [2**64 - 1, 0, 1]
    assert all(request.sampling.n == 1 for request in requests)
    assert split_choices("r", [5], SamplingParams())[0].request_id == "r"
