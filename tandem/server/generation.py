"""Runs the sequences of one HTTP request on a backend and joins what they produce.

It knows neither HTTP nor JSON. Closing the joined stream closes every sequence, which aborts it.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec

from tandem.engine.outputs import CompletionOutput, OutputDelta, OutputProcessor
from tandem.engine.tokenizer import Tokenizer
from tandem.errors import EngineDeadError
from tandem.scheduler.request import EngineRequest
from tandem.server.api_error import ApiError
from tandem.server.backend import Backend
from tandem.state.ticket import Ticket

Item = TypeVar("Item")

# Deltas that one sequence may be ahead of a slow reader before it waits.
_QUEUE_LENGTH = 64


class ChoiceDelta(msgspec.Struct, frozen=True):
    """`ticket`: of a prefill that another engine is to continue."""

    index: int
    delta: OutputDelta
    ticket: Ticket | None = None


def run_choices(
    backend: Backend, tokenizer: Tokenizer, requests: Sequence[EngineRequest]
) -> AsyncGenerator[ChoiceDelta, None]:
    """Deltas of all sequences as they come; each sequence ends with a finish reason.

    Raises: what the backend raises; ApiError when an engine reports that a sequence failed.
    """
    streams = [
        _run_choice(backend, tokenizer, index, request) for index, request in enumerate(requests)
    ]
    return merge(streams)


async def _run_choice(
    backend: Backend, tokenizer: Tokenizer, index: int, request: EngineRequest
) -> AsyncGenerator[ChoiceDelta, None]:
    processor = OutputProcessor(tokenizer, request.sampling, request.prompt_token_ids)
    async with aclosing(backend.generate(request)) as deltas:
        async for delta in deltas:
            output = processor.push(delta)
            if output.finish_reason == "error":
                raise ApiError(
                    output.error or "the engine failed this request", status=500, code="failed"
                )
            if output.finish_reason == "abort":
                raise EngineDeadError("the engine aborted this request; send it again")
            ticket = delta.ticket
            if ticket is not None and output.finish_reason != "hold":
                # A stop string ended the answer at its first token: nobody will read the state.
                await backend.release_ticket(ticket.ticket_id)
                ticket = None
            yield ChoiceDelta(index, output, ticket)
            if output.finish_reason is not None:
                return
    raise EngineDeadError(f"the engine ended request {request.request_id} without saying why")


def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Items of several streams in the order of their arrival; the first error ends all."""
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _merge(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[Item, None]:
    queue: asyncio.Queue[Item | BaseException | None] = asyncio.Queue(_QUEUE_LENGTH)

    async def pump(stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
        except Exception as error:  # handed to the reader, which raises it
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            arrived = await queue.get()
            if arrived is None:
                num_open -= 1
            elif isinstance(arrived, BaseException):
                raise arrived
            else:
                yield arrived
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(
    deltas: AsyncGenerator[ChoiceDelta, None], num_choices: int
) -> tuple[list[CompletionOutput], list[Ticket]]:
    """Whole answers in index order, and the tickets of held ones."""
    outputs = [CompletionOutput(index) for index in range(num_choices)]
    tickets = []
    async with aclosing(deltas):
        async for item in deltas:
            outputs[item.index].add(item.delta)
            if item.ticket is not None:
                tickets.append(item.ticket)
    return outputs, tickets
