"""The JSON of answers: whole and in chunks, for completions and for chat.

A format knows one request: its id, its prompts, which fields were asked for. Chunks of a choice
joined together hold what its whole form holds.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from tandem.engine.outputs import CompletionOutput, OutputDelta, OutputToken
from tandem.engine.tokenizer import Tokenizer
from tandem.server.stream import sse_event

# JSON has no infinity.
LOGPROB_FLOOR = -9999.0
_MARK = "\0text"  # is part of no name
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Prompt:
    """`text` is None for a prompt that came as token ids."""

    text: str | None
    token_ids: list[int]


@dataclass(frozen=True)
class Usage:
    num_prompt_tokens: int
    num_generated_tokens: int

    def body(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
        }


@dataclass
class AnswerFormat(ABC):
    """What both formats need. `num_answers` is n: choice i answers prompt i // n."""

    reply_id: str
    model: str
    tokenizer: Tokenizer
    prompts: list[Prompt]
    num_answers: int
    has_logprobs: bool = False
    has_token_ids: bool = False
    has_usage: bool = False  # of a stream: a last chunk tells it
    echo: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)
    _frames: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.num_answers]

    @abstractmethod
    def chunk(self, index: int, delta: OutputDelta) -> dict[str, Any] | None:
        """None when there is nothing that this client asked for."""

    def event(self, index: int, delta: OutputDelta) -> bytes | None:
        """The chunk as it is sent; None when there is nothing that this client asked for.

        Between the first and the last chunk of a choice nothing but the text changes, if nothing
        else was asked for: the rest is written once.
        """
        frame = self._frames.get(index)
        if frame is None or delta.finish_reason is not None:
            chunk = self.chunk(index, delta)
            if self._has_text_alone and index in self._begun and delta.finish_reason is None:
                self._frames[index] = self._frame(index)
            return None if chunk is None else sse_event(chunk)
        if not delta.text:
            return None
        before, behind = frame
        return before + _encode(delta.text) + behind

    @property
    def _has_text_alone(self) -> bool:
        return not self.has_logprobs and not self.has_token_ids

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and behind the text of every chunk of a choice."""
        # Quotes inside of strings are escaped: the mark is found where it was put.
        chunk = self.chunk(index, OutputDelta(_MARK, ()))
        assert chunk is not None
        before, behind = sse_event(chunk).split(_encode(_MARK))
        return before, behind

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.reply_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _begins(self, index: int) -> bool:
        """True once a choice: for its first chunk."""
        is_first = index not in self._begun
        self._begun.add(index)
        return is_first

    def _add_token_ids(
        self, choice: dict[str, Any], tokens: Sequence[OutputToken], *, with_prompt: bool
    ) -> None:
        if self.has_token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
            if with_prompt:
                choice["prompt_token_ids"] = self.prompt_of(choice["index"]).token_ids


class Format(Protocol):
    """How one endpoint writes answers."""

    has_usage: bool

    def whole(self, outputs: Sequence[CompletionOutput], usage: Usage) -> dict[str, Any]: ...

    def event(self, index: int, delta: OutputDelta) -> bytes | None: ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...


class CompletionFormat(AnswerFormat):
    """Answers of /v1/completions."""

    def whole(self, outputs: Sequence[CompletionOutput], usage: Usage) -> dict[str, Any]:
        choices = []
        for output in outputs:
            echoed = self._echoed(output.index)
            choices.append(
                self._choice(
                    output.index,
                    echoed + output.text,
                    output.tokens,
                    output.finish_reason,
                    output.stop_reason,
                    with_prompt=True,
                )
            )
        return {**self._envelope("text_completion", choices), "usage": usage.body()}

    def chunk(self, index: int, delta: OutputDelta) -> dict[str, Any] | None:
        is_shown = bool(delta.text or delta.finish_reason)
        if not is_shown and not (delta.tokens and (self.has_logprobs or self.has_token_ids)):
            return None
        is_first = self._begins(index)
        text = self._echoed(index) + delta.text if is_first else delta.text
        choice = self._choice(
            index, text, delta.tokens, delta.finish_reason, delta.stop_reason, with_prompt=is_first
        )
        body = self._envelope("text_completion", [choice])
        return {**body, "usage": None} if self.has_usage else body

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._envelope("text_completion", []), "usage": usage.body()}

    def _echoed(self, index: int) -> str:
        if not self.echo:
            return ""
        prompt = self.prompt_of(index)
        return self.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text

    def _choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[OutputToken],
        finish_reason: str | None,
        stop_reason: str | int | None,
        *,
        with_prompt: bool,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(self.tokenizer, tokens) if self.has_logprobs else None,
            "finish_reason": _public_reason(finish_reason),
            "stop_reason": stop_reason,
        }
        self._add_token_ids(choice, tokens, with_prompt=with_prompt)
        return choice


class ChatFormat(AnswerFormat):
    """Answers of /v1/chat/completions."""

    def whole(self, outputs: Sequence[CompletionOutput], usage: Usage) -> dict[str, Any]:
        choices = []
        for output in outputs:
            choice = {
                "index": output.index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": self._logprobs(output.tokens),
                "finish_reason": _public_reason(output.finish_reason),
                "stop_reason": output.stop_reason,
            }
            self._add_token_ids(choice, output.tokens, with_prompt=True)
            choices.append(choice)
        return {**self._envelope("chat.completion", choices), "usage": usage.body()}

    def chunk(self, index: int, delta: OutputDelta) -> dict[str, Any] | None:
        is_shown = bool(delta.text or delta.finish_reason)
        if not is_shown and not (delta.tokens and (self.has_logprobs or self.has_token_ids)):
            return None
        is_first = self._begins(index)
        message: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
        if delta.text:
            message["content"] = delta.text
        choice: dict[str, Any] = {
            "index": index,
            "delta": message,
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": _public_reason(delta.finish_reason),
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        self._add_token_ids(choice, delta.tokens, with_prompt=is_first)
        body = self._envelope("chat.completion.chunk", [choice])
        return {**body, "usage": None} if self.has_usage else body

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._envelope("chat.completion.chunk", []), "usage": usage.body()}

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any] | None:
        if not self.has_logprobs or not tokens:
            return None
        return chat_logprobs(self.tokenizer, tokens)


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[OutputToken]) -> dict[str, Any]:
    """The four parallel lists of the completions endpoint, one entry a token.

    A token that is part of a character is written `bytes:\\xe6\\x97`, as OpenAI's API did, so that
    different tokens keep different names. `top_logprobs` holds the sampled token besides the best.
    """
    names: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token in tokens:
        name = _legacy_name(tokenizer.token_bytes(token.token_id))
        names.append(name)
        offsets.append(token.text_offset)
        if token.logprob is None:
            values.append(None)
            tops.append(None)
            continue
        value = finite_logprob(token.logprob.logprob)
        values.append(value)
        top = {
            _legacy_name(tokenizer.token_bytes(other)): finite_logprob(logprob)
            for other, logprob in token.logprob.top
        }
        tops.append({**top, name: value})
    return {
        "tokens": names,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[OutputToken]) -> dict[str, Any]:
    """`content`: one entry a token with its bytes and the best tokens at its place."""
    content = []
    for token in tokens:
        if token.logprob is None:
            continue
        entry = _chat_entry(tokenizer, token.token_id, token.logprob.logprob)
        entry["top_logprobs"] = [
            _chat_entry(tokenizer, other, logprob) for other, logprob in token.logprob.top
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        name = _escaped(raw)
    return {"token": name, "logprob": finite_logprob(logprob), "bytes": list(raw)}


def _legacy_name(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + _escaped(raw)


def _escaped(raw: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in raw)


def finite_logprob(logprob: float) -> float:
    # Also turns NaN, which compares false with everything, into the floor.
    return logprob if LOGPROB_FLOOR <= logprob < math.inf else LOGPROB_FLOOR


def _public_reason(reason: str | None) -> str | None:
    # A held prefill ends here for length: one token was asked of this engine.
    return "length" if reason == "hold" else reason
