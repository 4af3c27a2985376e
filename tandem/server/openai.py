"""The bodies of /v1/completions and /v1/chat/completions: fields, types and what is refused.

Every field is either served, known to have no effect on the answer, or refused by name. A field
that is not served is accepted with the value that asks for nothing (`"tools": []`), because
clients send defaults. `null` always means: not given. It knows no engine and no tokenizer.
"""

import re
from typing import Any, TypeVar

import msgspec

from tandem.scheduler.request import SamplingParams
from tandem.server.api_error import ApiError

Body = TypeVar("Body", bound="GenerationBody")

DEFAULT_COMPLETION_TOKENS = 16
_TOKEN_ID = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

# They name a user, a cache or a bill, and change no token.
NO_EFFECT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})

# Not served: refused by name, unless the value asks for nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that both endpoints share. From `top_k` on they go beyond OpenAI's, as in vLLM.

    `return_token_ids` adds the ids of prompt and answer to each choice.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    stop: str | list[str] = []
    max_tokens: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    kv_transfer_params: dict[str, Any] | None = None

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """How to sample; not validated yet (SamplingParams.validate knows the vocabulary)."""
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_token_biases(self.logit_bias),
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens,
        )


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """`prompt`: a text, several texts, token ids, or several lists of token ids."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt. Raises ApiError for an empty or mixed list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if not kinds:
            raise ApiError("prompt is an empty list; expected a text or token ids", param="prompt")
        if len(kinds) > 1:
            raise ApiError(
                "prompt mixes texts and token ids; expected a text, a list of texts, a list of "
                "token ids, or a list of such lists",
                param="prompt",
            )
        if kinds == {int}:
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def token_limit(self) -> int | None:
        """Tokens to generate at most; None: as many as the model's length leaves."""
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ApiError(
                f"max_tokens={self.max_tokens} and max_completion_tokens="
                f"{self.max_completion_tokens} differ; give one of them",
                param="max_completion_tokens",
            )
        return next(iter(limits), None)

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def parse_body(raw: bytes, kind: type[Body]) -> Body:
    """Decode and check the body of a request.

    Raises: ApiError (400) that names the field at fault.
    """
    try:
        values = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = ""
        if _SURROGATE.search(raw):
            hint = "; an escape \\ud800 to \\udfff is half a character and needs its other half"
        message = f"the body is not valid JSON: {error}{hint}"
        raise ApiError(message, code="invalid_json") from error
    if not isinstance(values, dict):
        raise ApiError(f"the body is a {type(values).__name__}; expected a JSON object")
    fields = set(kind.__struct_fields__)
    served = {}
    for name, value in values.items():
        if name in fields:
            if value is not None:
                served[name] = value
        elif name in NEUTRAL_VALUES:
            _require_neutral(name, value, values)
        elif name not in NO_EFFECT:
            raise ApiError(
                f"unknown field {name!r}; remove it, or see the documentation of served fields",
                param=name,
                code="unknown_parameter",
            )
    try:
        body = msgspec.convert(served, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _validation_error(str(error)) from error
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options needs stream=true", param="stream_options")
    return body


def _require_neutral(name: str, value: Any, values: dict[str, Any]) -> None:
    if value is None or any(value == neutral for neutral in NEUTRAL_VALUES[name]):
        return
    if name == "best_of" and value == values.get("n"):
        return  # the best n of n: all of them
    raise ApiError(
        f"{name}={_shortened(value)} is not supported; remove the field",
        param=name,
        code="unsupported_parameter",
    )


def _validation_error(message: str) -> ApiError:
    """msgspec says "Expected `int`, got `str` - at `$.max_tokens`"; name the field first."""
    path = re.search(r" - at `\$\.?([^`]*)`$", message)
    missing = re.search(r"missing required field `(\w+)`", message)
    if path and path[1]:
        param = re.split(r"[.\[]", path[1])[0]
        return ApiError(f"{path[1]}: {message[: path.start()]}", param=param)
    return ApiError(message, param=missing[1] if missing else None)


def _token_biases(biases: dict[str, float]) -> dict[int, float]:
    for key in biases:
        # int() would also read " 5 ", "1_0" and "05", and two keys could mean one token.
        if not _TOKEN_ID.fullmatch(key):
            raise ApiError(
                f"logit_bias has a key that is no token id: {_shortened(key)}; expected digits",
                param="logit_bias",
            )
    return {int(key): bias for key, bias in biases.items()}


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
