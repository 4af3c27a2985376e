"""A request as clients state it (`SamplingParams`, `EngineRequest`) and as the scheduler tracks it
(`Request`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from tandem.errors import RequestError
from tandem.state.ticket import PrefillSource, Ticket, TokenLogprob

MAX_LOGPROBS = 20
# Each character of an answer is compared with each stop string, beside all other answers.
MAX_STOP_STRINGS = 1024
MAX_STOP_CHARS = 1 << 16
MAX_COUNT = 2**31 - 1
# Ids come from afar. They are part of messages whose texts are bounded, legs of a request add to
# them, and every table of an engine keeps some.
MAX_ID_CHARS = 256


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop. Plain data; `validate` refuses what cannot work.

    `temperature == 0` is greedy. `top_k == 0` (or -1) is off. `seed` makes a request repeatable
    whatever its neighbours. `max_tokens is None` means up to the model's length. `logprobs`: how
    many of the best tokens to report at each place, besides the sampled one. Presence and
    frequency penalties count generated tokens, the repetition penalty prompt and generated ones.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def validate(self, vocab_size: int | None = None) -> None:
        """Raises RequestError naming the field, its value and what is expected."""
        self._validate_types()
        _range("n", self.n, 1, 128)
        _range("temperature", self.temperature, 0, 100)
        _range("top_p", self.top_p, 0, 1, open_low=True)
        _range("top_k", self.top_k, -1, MAX_COUNT)
        _range("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _range("seed", self.seed, -(2**63), 2**64 - 1)
        _range("presence_penalty", self.presence_penalty, -2, 2)
        _range("frequency_penalty", self.frequency_penalty, -2, 2)
        _range("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True)
        if self.max_tokens is not None:
            _range("max_tokens", self.max_tokens, 1, MAX_COUNT)
        _range("min_tokens", self.min_tokens, 0, MAX_COUNT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}", "min_tokens"
            )
        if self.logprobs is not None:
            _range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._validate_stop()
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token_id in ids:
                if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
                    raise RequestError(
                        f"{name} has token id {token_id}; expected 0..{(vocab_size or 0) - 1}", name
                    )
        for bias in self.logit_bias.values():
            _range("logit_bias", bias, -100, 100)

    def _validate_types(self) -> None:
        """A constructor call checks none, and a wrong one would fail a step with its neighbours."""
        for name, value in msgspec.structs.asdict(self).items():
            try:
                msgspec.convert({name: value}, SamplingParams)
            except msgspec.ValidationError as error:
                raise RequestError(f"{name}={value!r}: {error}", name) from error

    def _validate_stop(self) -> None:
        if any(not text for text in self.stop):
            raise RequestError("stop holds an empty string; remove it", "stop")
        num_chars = sum(map(len, self.stop))
        if len(self.stop) > MAX_STOP_STRINGS or num_chars > MAX_STOP_CHARS:
            raise RequestError(
                f"stop holds {len(self.stop)} strings of {num_chars} characters together; expected "
                f"at most {MAX_STOP_STRINGS} of {MAX_STOP_CHARS}",
                "stop",
            )


def check_id(name: str, text: str) -> None:
    """Raises: RequestError for an id that is too long to be passed on."""
    if len(text) > MAX_ID_CHARS:
        raise RequestError(
            f"{name}={text[:32]!r}... has {len(text)} characters; expected at most {MAX_ID_CHARS}",
            name,
        )


def outside_vocabulary(token_ids: Sequence[int], vocab_size: int) -> int | None:
    """An id that is no token of the vocabulary; None if there is none. Long prompts are looked
    through between two steps of others."""
    if not token_ids:
        return None
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0:
        return lowest
    return highest if highest >= vocab_size else None


def _range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{name}={value}; expected a finite number", name)
    if not low <= value <= high or (open_low and value == low):
        left = "(" if open_low else "["
        raise RequestError(f"{name}={value}; expected a value in {left}{low}, {high}]", name)


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue (n = 1), as it enters an engine.

    `hold`: stop after the first token and keep pages and slot under a lease (prefill engine).
    `ticket`: the state of the prompt is read from a peer instead of computed (decode engine).
    `source`: as `ticket`, of a prefill that may still run or be queued; its first token is reported
    here when it is known.
    `generated`: tokens that an earlier engine produced for this request; they count as generated
    (penalties, max_tokens, seed positions) and are not reported again.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    hold: bool = False
    ticket: Ticket | None = None
    source: PrefillSource | None = None
    generated: list[int] = []


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to a request. `logprobs` has one entry a token when they were asked for.

    `finish_reason`: "stop" (end-of-sequence or stop token; `stop_token_id` says which), "length",
    "abort", "error" (`error` says why); None while it runs. A held prefill finishes with its
    `ticket` and with `finish_reason == "hold"`, unless its first token already ends the request.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_token_id: int | None = None
    error: str | None = None
    ticket: Ticket | None = None
    num_prompt_tokens: int = 0


def join_deltas(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """What several steps added to a request that runs on, as one."""
    assert all(delta.finish_reason is None for delta in deltas), deltas
    if len(deltas) == 1:
        return deltas[0]
    return msgspec.structs.replace(
        deltas[0],
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=None
        if all(delta.logprobs is None for delta in deltas)
        else [entry for delta in deltas for entry in delta.logprobs or ()],
    )


class RequestState(Enum):
    FOLLOWING = "following"  # holds nothing; its prefill has not begun on a peer
    WAITING = "waiting"  # holds nothing
    READING = "reading"  # holds pages and a slot that a peer's state is read into
    RUNNING = "running"  # holds pages and a slot
    FINISHED = "finished"


@dataclass
class Request:
    """A sequence inside the scheduler.

    Invariant: `num_computed` tokens of `prompt + output` have gone through the model exactly once,
    and when no plan runs, the slot holds the state after exactly that many. Plans that run now
    bring it to `num_planned`, where the next plan goes on, and sample `num_pending` tokens behind
    those of `output_token_ids`.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: frozenset[int]
    max_total_tokens: int  # prompt and output together; generation ends there with "length"
    hold: bool = False
    ticket: Ticket | None = None
    source: PrefillSource | None = None  # until its ticket is known
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_planned: int = 0
    num_pending: int = 0
    state: RequestState = RequestState.WAITING
    num_preemptions: int = 0
    serial: int = 0  # order of arrival in this scheduler
    is_known: bool = False  # to workers
    last_step: int = -1  # the last plan that has it
    num_paged_tokens: int = 0  # that the reserved pages cover
    num_sent_pages: int = 0  # pages that workers know of, counted from the first
    num_cached_tokens: int = 0  # whose pages were here when memory was reserved: not to be read
    num_prompt_tokens: int = field(init=False)
    length_limit: int = field(init=False)  # tokens in all with which it ends in any case

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        limit, max_tokens = self.max_total_tokens, self.sampling.max_tokens
        if max_tokens is not None:
            limit = min(limit, self.num_prompt_tokens + max_tokens)
        self.length_limit = limit

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def is_ending(self) -> bool:
        """Whether a token that a running plan samples is its last, whatever it is."""
        if self.num_pending == 0:
            return False
        return self.hold or self.num_tokens + self.num_pending >= self.length_limit

    @property
    def is_remote(self) -> bool:
        """Whether the state of the prompt comes from a peer."""
        return self.ticket is not None or self.source is not None

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens `[start, stop)` of prompt and output together."""
        split = self.num_prompt_tokens
        if stop <= split:
            return self.prompt_token_ids[start:stop]
        return (
            self.prompt_token_ids[start:split]
            + self.output_token_ids[max(start - split, 0) : stop - split]
        )
