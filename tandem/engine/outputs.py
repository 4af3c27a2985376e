"""From the tokens of an engine to the text of an answer.

`OutputProcessor` turns the deltas of one sequence into text: characters are whole, stop strings
are found wherever token borders lie and never shown before it is known that they do not complete,
and every token that is reported has exactly one entry. Joined pieces equal the whole. The same
code serves one engine, the router and the offline API. It knows no HTTP and no engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tandem.scheduler.request import EngineRequest, SamplingParams, TokenDelta
from tandem.state.ticket import TokenLogprob

# A character has at most four bytes, so at most three of its bytes wait for the last one.
_MAX_PENDING_CHARS = 3
# Tokens without a character border are decoded again with each new one; this bounds them.
_MAX_WINDOW_TOKENS = 48
_KEPT_WINDOW_TOKENS = 12
_NUM_CONTEXT_TOKENS = 6
_REPLACEMENT = "\ufffd"


class Decodes(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class OutputToken(msgspec.Struct, frozen=True):
    """A token of an answer. `text_offset`: where its text begins in the answer, in characters.

    A token that the answer's text ends before (part of a stop string) begins at the text's end.
    """

    token_id: int
    text_offset: int
    logprob: TokenLogprob | None = None


class OutputDelta(msgspec.Struct, frozen=True):
    """What a client may see of an answer since the last delta.

    `finish_reason`: "stop", "length", "abort", "error" (`error` says why), "hold" (a prefill
    engine's answer that goes on elsewhere), or None. `stop_reason`: the stop string or stop token
    id that ended it. `num_generated` counts all tokens so far, shown or held back.
    """

    text: str
    tokens: tuple[OutputToken, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_generated: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.tokens and self.finish_reason is None


@dataclass
class CompletionOutput:
    """One answer, whole or so far; `index` is its place among a request's `n` answers."""

    index: int
    text: str = ""
    tokens: list[OutputToken] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One entry a token; None unless every token has one."""
        entries = [token.logprob for token in self.tokens if token.logprob is not None]
        return entries if len(entries) == len(self.tokens) and entries else None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, delta: OutputDelta) -> None:
        self.text += delta.text
        self.tokens.extend(delta.tokens)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.error = delta.error


@dataclass
class RequestOutput:
    """A prompt and its answers, in index order."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def is_finished(self) -> bool:
        return all(output.is_finished for output in self.outputs)


def split_choices(
    request_id: str, prompt_token_ids: list[int], sampling: SamplingParams
) -> list[EngineRequest]:
    """The `n` sequences of a request. A seeded request's sequences get neighbouring seeds."""
    requests = []
    for index in range(sampling.n):
        seed = sampling.seed
        if seed is not None and index:
            seed = (seed + index) & (2**64 - 1)
        requests.append(
            EngineRequest(
                request_id=request_id if sampling.n == 1 else f"{request_id}-{index}",
                prompt_token_ids=prompt_token_ids,
                sampling=msgspec.structs.replace(sampling, n=1, seed=seed),
            )
        )
    return requests


class Detokenizer:
    """Decodes a growing list of tokens; gives text out as soon as it cannot change any more.

    It decodes a window: the last tokens whose text is out, then those that wait. Text may depend
    on what comes before it (a leading space), which the window's first part provides; prompt
    tokens do so at the start. `U+FFFD` at the end of the window may be an unfinished character
    and waits.
    """

    def __init__(
        self,
        tokenizer: Decodes,
        context: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(context[-_NUM_CONTEXT_TOKENS:])
        self._shown = self._decode(self._window)  # text of the window that is out
        if self._shown.endswith(_REPLACEMENT):  # a prompt that ends inside a character
            self._window, self._shown = [], ""
        self._border = len(self._window)  # tokens of the window whose text is out

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain."""
        self._window.append(token_id)
        text = self._decode(self._window)
        stop = len(text)
        while stop and len(text) - stop < _MAX_PENDING_CHARS and text[stop - 1] == _REPLACEMENT:
            stop -= 1
        if not text.startswith(self._shown):
            # Some decoders turn a whole run of bytes into U+FFFD while its last character is
            # unfinished, and back when it is complete. Wait for that.
            self._bound_window(text, len(text) - _MAX_PENDING_CHARS)
            return ""
        new = text[len(self._shown) : stop]
        if stop < len(text):
            self._shown = text[: max(stop, len(self._shown))]
            self._bound_window(text, len(self._shown))
            return new
        tail = self._decode(self._window[self._border :])
        if tail:  # an empty text would lose what the next token's text depends on
            self._window = self._window[self._border :]
            self._shown = tail
        else:
            self._shown = text
        self._border = len(self._window)
        return new

    def flush(self) -> str:
        """The text that still waits, at the end of the answer. Nothing may be pushed after it."""
        text = self._decode(self._window)
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        return self._decode(self._window[self._border :])

    def _bound_window(self, text: str, num_shown: int) -> None:
        """Drop old tokens of a window that finds no border, and keep what is not out yet."""
        if len(self._window) <= _MAX_WINDOW_TOKENS:
            return
        num_waiting = len(text) - max(num_shown, 0)
        self._window = self._window[-_KEPT_WINDOW_TOKENS:]
        kept = self._decode(self._window)
        self._shown = kept[: max(len(kept) - num_waiting, 0)]
        self._border = 0

    def _decode(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class StopMatcher:
    """Finds the first of several strings to complete in a text that arrives character by character.

    One automaton a string (Knuth, Morris, Pratt 1977): a state is how many of its characters the
    text ends with, which is exactly what has to be held back. Strings may be of any length.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        # Longest first: of two that complete at the same character, the one that began earlier.
        self._strings = sorted(strings, key=len, reverse=True)
        self._fallbacks = [_failure_table(string) for string in self._strings]
        self._states = [0] * len(self._strings)

    def push(self, char: str) -> str | None:
        """Add one character; return the string that it completes, if any."""
        found = None
        for index, string in enumerate(self._strings):
            fallback = self._fallbacks[index]
            state = self._states[index]
            while state and string[state] != char:
                state = fallback[state - 1]
            if string[state] == char:
                state += 1
            if state == len(string):
                found = found or string
                state = fallback[state - 1]
            self._states[index] = state
        return found

    @property
    def num_held(self) -> int:
        """How many characters at the text's end may become part of a stop string."""
        return max(self._states, default=0)


def _failure_table(string: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is also a prefix."""
    table = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = table[length - 1]
        if string[index] == string[length]:
            length += 1
        table[index] = length
    return table


class OutputProcessor:
    """Turns the token deltas of one sequence into text deltas.

    After a delta with a finish reason the sequence is over; when a stop string ended it, the
    caller aborts the engine's request, and later tokens are ignored.
    """

    def __init__(
        self,
        tokenizer: Decodes,
        sampling: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._sampling = sampling
        self._detokenizer = Detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        self._matcher = StopMatcher(sampling.stop)
        self._pending = ""  # text of the answer that is not out yet
        self._num_shown = 0  # characters that are out
        self._waiting: list[tuple[int, OutputToken]] = []  # (where the token's text ends, token)
        self._num_generated = 0
        self._stop_string: str | None = None
        self._is_finished = False

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far, up to the one that completed a stop string."""
        return self._num_generated

    def push(self, delta: TokenDelta) -> OutputDelta:
        """Take what one step added; return what became visible."""
        if self._is_finished:
            return OutputDelta("", (), num_generated=self._num_generated)
        reason = delta.finish_reason
        if reason is None and not self._sampling.stop:
            return self._push_plain(delta)
        stop_reason: str | int | None = None
        for index, token_id in enumerate(delta.token_ids):
            is_last = index == len(delta.token_ids) - 1
            is_stop_token = is_last and reason == "stop" and delta.stop_token_id is not None
            logprob = delta.logprobs[index] if delta.logprobs else None
            self._push_token(token_id, logprob, has_text=not is_stop_token or self._keeps_stop)
            if self._stop_string is not None:
                reason, stop_reason = "stop", self._stop_string
                break
        else:
            if reason is not None:
                # The last character may stay unfinished: show what there is of it.
                self._append(self._detokenizer.flush())
                if self._stop_string is not None:
                    reason, stop_reason = "stop", self._stop_string
                elif reason == "stop" and delta.stop_token_id in self._sampling.stop_token_ids:
                    stop_reason = delta.stop_token_id
        self._is_finished = reason is not None
        return OutputDelta(
            text=self._take_text(),
            tokens=self._take_tokens(),
            finish_reason=reason,
            stop_reason=stop_reason,
            error=delta.error if reason == delta.finish_reason else None,
            num_generated=self._num_generated,
        )

    def _push_plain(self, delta: TokenDelta) -> OutputDelta:
        """In the middle of an answer without stop strings nothing is held back."""
        texts, tokens = [], []
        start = self._num_shown
        for index, token_id in enumerate(delta.token_ids):
            logprob = delta.logprobs[index] if delta.logprobs else None
            tokens.append(OutputToken(token_id, start, logprob))
            text = self._detokenizer.push(token_id)
            texts.append(text)
            start += len(text)
        self._num_generated += len(tokens)
        self._num_shown = start
        return OutputDelta("".join(texts), tuple(tokens), num_generated=self._num_generated)

    @property
    def _keeps_stop(self) -> bool:
        return self._sampling.include_stop_str_in_output

    def _push_token(self, token_id: int, logprob: TokenLogprob | None, *, has_text: bool) -> None:
        start = self._num_shown + len(self._pending)
        self._num_generated += 1
        if has_text:
            self._append(self._detokenizer.push(token_id))
        stop = self._num_shown + len(self._pending)
        self._waiting.append((stop, OutputToken(token_id, start, logprob)))

    def _append(self, text: str) -> None:
        """Add text up to where a stop string completes, and cut the answer there."""
        if not self._sampling.stop:
            self._pending += text
            return
        for index, char in enumerate(text):
            found = self._matcher.push(char)
            if found is not None and self._num_generated >= self._sampling.min_tokens:
                self._pending += text[: index + 1]
                if not self._keeps_stop:
                    self._pending = self._pending[: -len(found)]
                self._stop_string = found
                return
        self._pending += text

    def _take_text(self) -> str:
        held = 0 if self._is_finished else self._matcher.num_held
        stop = max(len(self._pending) - held, 0)
        text, self._pending = self._pending[:stop], self._pending[stop:]
        self._num_shown += stop
        return text

    def _take_tokens(self) -> tuple[OutputToken, ...]:
        if self._is_finished:
            taken = [token for _, token in self._waiting]
            self._waiting = []
        else:
            count = 0
            while count < len(self._waiting) and self._waiting[count][0] <= self._num_shown:
                count += 1
            taken = [token for _, token in self._waiting[:count]]
            self._waiting = self._waiting[count:]
        end = self._num_shown + len(self._pending)
        return tuple(
            token if token.text_offset <= end else OutputToken(token.token_id, end, token.logprob)
            for token in taken
        )
