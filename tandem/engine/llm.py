"""The offline API: `LLM(path).generate(prompts, params)` and an asynchronous stream."""

import asyncio
import itertools
import operator
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from rich.progress import Progress

from tandem.config.args import build_config, setting_names
from tandem.engine.engine import EngineCore
from tandem.engine.outputs import (
    CompletionOutput,
    OutputDelta,
    OutputProcessor,
    RequestOutput,
    split_choices,
)
from tandem.engine.tokenizer import Tokenizer
from tandem.errors import ConfigError, EngineDeadError, RequestError, TandemError
from tandem.log import get_logger
from tandem.scheduler.request import EngineRequest, SamplingParams, TokenDelta

log = get_logger(__name__)

Prompt = str | Sequence[int]
_Sink = Callable[[TokenDelta | TandemError], None]


class LLM:
    """One engine in this process, for batches and scripts.

    Args:
        model: local HF folder.
        settings: any engine setting by name (`tp=2`, `max_num_seqs=8`, `page_tokens=64`, ...); see
            config/engine.py.

    Usable from several threads; close() (or `with`) ends its processes.
    Raises: ModelError, ConfigError, CapacityError, ShardingError.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self._core = EngineCore(build_config(model, _checked(settings)))
        self._tokenizer: Tokenizer | None = None
        self._model = model
        self._ids = itertools.count()
        self._sinks: dict[str, _Sink] = {}
        self._inbox: queue.SimpleQueue[EngineRequest | str | None] = queue.SimpleQueue()
        self._dead: TandemError | None = None
        self._thread = threading.Thread(target=self._run, name="tandem-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """Loaded at first use: prompts of token ids need none."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.load(self._model)
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue prompts (text or token ids); one result a prompt, in order.

        Raises: RequestError for a prompt or parameter that cannot be served (nothing runs then),
        EngineDeadError if the engine is lost. An error of one request is in its output.
        """
        items = _as_list(prompts)
        chosen = _params_for(items, params)
        jobs = [self._job(prompt, sampling) for prompt, sampling in zip(items, chosen, strict=True)]
        results: queue.SimpleQueue[tuple[_Sequence, TokenDelta | TandemError]]
        results = queue.SimpleQueue()
        running = [sequence for job in jobs for sequence in job.sequences]
        for sequence in running:
            self._submit(sequence, partial(_put_with, results, sequence))
        try:
            with Progress(disable=not show_progress) as progress:
                task = progress.add_task("sequences", total=len(running))
                left = len(running)
                while left:
                    sequence, item = results.get()
                    if isinstance(item, TandemError):
                        raise item
                    if sequence.take(item).finish_reason is not None:
                        self._finish(sequence)
                        left -= 1
                        progress.advance(task)
        finally:
            for sequence in running:
                self._finish(sequence)
        return [job.output for job in jobs]

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[OutputDelta]:
        """Pieces of one answer as they become certain. Leaving the loop early aborts it."""
        sampling = params or SamplingParams()
        if sampling.n != 1:
            raise RequestError(f"stream() serves n=1, got n={sampling.n}; use generate()", "n")
        sequence = self._job(prompt, sampling).sequences[0]
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[TokenDelta | TandemError] = asyncio.Queue()
        self._submit(sequence, lambda item: _put_from_thread(loop, items, item))
        try:
            while True:
                item = await items.get()
                if isinstance(item, TandemError):
                    raise item
                delta = sequence.take(item)
                if not delta.is_empty:
                    yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._finish(sequence)

    def stats(self) -> dict[str, float]:
        """Counters and pools of the engine. Raises: EngineDeadError once it is closed or lost."""
        if self._dead is not None or not self._thread.is_alive():
            raise self._dead or EngineDeadError("the engine is closed")
        return self._core.stats()

    def close(self) -> None:
        """End the engine; running requests fail. Safe to call twice."""
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join()

    def _job(self, prompt: Prompt, sampling: SamplingParams) -> "_Job":
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"params is {type(sampling).__name__}; expected SamplingParams")
        sampling.validate()
        text = prompt if isinstance(prompt, str) else None
        token_ids = _token_ids(prompt) if text is None else self._encode(text)
        requests = split_choices(f"offline-{next(self._ids)}", token_ids, sampling)
        for request in requests:
            self._core.check(request)
        return _Job(text, requests, _LazyTokenizer(self))

    def _encode(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(f"the prompt is not valid Unicode: {error}", "prompt") from error

    def _submit(self, sequence: "_Sequence", sink: _Sink) -> None:
        if self._dead is not None or not self._thread.is_alive():
            raise self._dead or EngineDeadError("the engine is closed")
        self._sinks[sequence.request.request_id] = sink
        self._inbox.put(sequence.request)

    def _finish(self, sequence: "_Sequence") -> None:
        """Stop listening, and stop the engine's work if it still runs."""
        if self._sinks.pop(sequence.request.request_id, None) is not None and not sequence.is_over:
            self._inbox.put(sequence.request.request_id)

    def _run(self) -> None:
        try:
            while self._take_messages():
                for delta in self._core.step():
                    sink = self._sinks.get(delta.request_id)
                    if sink is not None:
                        sink(delta)
        except TandemError as error:
            self._dead = error
        except Exception as error:
            self._dead = EngineDeadError(f"the engine met a bug: {type(error).__name__}: {error}")
            log.exception("the engine has ended")
        finally:
            self._core.close()
            lost = self._dead or EngineDeadError("the engine was closed")
            for sink in list(self._sinks.values()):
                sink(lost)

    def _take_messages(self) -> bool:
        """Apply what callers asked for; waits while there is nothing to do. False: close."""
        while True:
            try:
                message = self._inbox.get(block=not self._core.has_work())
            except queue.Empty:
                return True
            if message is None:
                return False
            if isinstance(message, str):
                self._core.abort(message)
                continue
            try:
                self._core.add(message)
            except TandemError as error:
                sink = self._sinks.get(message.request_id)
                if sink is not None:
                    sink(error)


class _Sequence:
    """One answer in the making."""

    def __init__(self, request: EngineRequest, tokenizer: Any, output: CompletionOutput) -> None:
        self.request = request
        self.is_over = False  # the engine has reported the end
        self._processor = OutputProcessor(tokenizer, request.sampling, request.prompt_token_ids)
        self._output = output

    def take(self, delta: TokenDelta) -> OutputDelta:
        self.is_over = delta.finish_reason is not None
        piece = self._processor.push(delta)
        self._output.add(piece)
        return piece


class _Job:
    """One prompt with its `n` answers."""

    def __init__(self, text: str | None, requests: list[EngineRequest], tokenizer: Any) -> None:
        outputs = [CompletionOutput(index) for index in range(len(requests))]
        self.sequences = [
            _Sequence(request, tokenizer, output)
            for request, output in zip(requests, outputs, strict=True)
        ]
        self.output = RequestOutput(
            requests[0].request_id, text, requests[0].prompt_token_ids, outputs
        )


class _LazyTokenizer:
    """Decodes with the model's tokenizer; a folder without one gives empty text, not an error."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._is_missing = False

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self._is_missing:
            return ""
        try:
            return self._llm.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except TandemError:
            self._is_missing = True
            return ""


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    known = setting_names()
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise TypeError(f"unknown setting {', '.join(unknown)}; known: {', '.join(known)}")
    role = settings.get("role", "colocated")
    if role != "colocated":
        raise ConfigError(
            f"role={role!r}: an offline engine has no peers; leave it out, or start a server with "
            "tandem serve --role"
        )
    return settings


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(_prompt_message(prompts), "prompt")
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _token_ids(prompt: Any) -> list[int]:
    """Token ids of any integer type; bytes and truth values are mistakes."""
    try:
        if isinstance(prompt, bytes) or any(isinstance(item, bool) for item in prompt):
            raise TypeError
        return [operator.index(item) for item in prompt]
    except TypeError:
        raise RequestError(_prompt_message(prompt), "prompt") from None


def _prompt_message(prompt: object) -> str:
    text = repr(prompt)
    shown = text if len(text) <= 60 else text[:57] + "..."
    return f"prompt {shown} is {type(prompt).__name__}; expected a text or token ids"


def _params_for(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if not isinstance(params, list | tuple):
        raise RequestError(
            f"params is {type(params).__name__}; expected SamplingParams or a list of them"
        )
    if len(params) != len(prompts):
        raise RequestError(f"{len(params)} params for {len(prompts)} prompts; give one or as many")
    return list(params)


def _put_with(
    results: "queue.SimpleQueue[tuple[_Sequence, TokenDelta | TandemError]]",
    sequence: _Sequence,
    item: TokenDelta | TandemError,
) -> None:
    results.put((sequence, item))


def _put_from_thread(
    loop: asyncio.AbstractEventLoop,
    items: "asyncio.Queue[TokenDelta | TandemError]",
    item: TokenDelta | TandemError,
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(items.put_nowait, item)
