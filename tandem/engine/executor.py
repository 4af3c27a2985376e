"""Runs plans on every rank of one engine: in this process, or on one process per rank.

Both executors present the same face to the engine loop. They move plans and results; they decide
nothing.
"""

import subprocess
import time
from collections import deque
from typing import Protocol

import msgspec
import zmq

from tandem.config.engine import EngineConfig
from tandem.engine.child import end, make_folder, remove_folder, spawn
from tandem.engine.messages import (
    Collect,
    Execute,
    Failure,
    FromRank,
    GiveUp,
    PollMoves,
    PostMove,
    RankReady,
    RankReply,
    RankSettings,
    ToRank,
)
from tandem.errors import EngineDeadError
from tandem.runner.model_runner import ModelRunner, PendingStep
from tandem.runner.worker import Worker
from tandem.scheduler.step import StepPlan, StepResult
from tandem.transfer.layout import PeerInfo, RankInfo
from tandem.transfer.mover import MoveCommand, MoveEvent

# Loading a large checkpoint from a slow disk takes minutes; a step never takes this long.
START_TIMEOUT_S = 1800.0
STEP_TIMEOUT_S = 600.0
# Once one rank has failed, the others fail too or are stuck waiting for it.
_FAILURE_GRACE_S = 5.0
_SEND_CHECK_MS = 100


class Mover(Protocol):
    """Who moves the parts of requests: the ranks of an engine, or a side channel that asks a peer
    to. See transfer/mover.py for commands and events; events come with their rank."""

    def post_move(self, peer: PeerInfo, command: MoveCommand) -> None: ...
    def give_up_move(self, request_id: str) -> None: ...
    def poll_moves(self) -> list[tuple[int, MoveEvent]]: ...


class Executor(Mover, Protocol):
    """What the engine loop needs of its ranks. `check` raises EngineDeadError if one is lost.

    `submit` starts a plan, `collect` waits for the end of the oldest one that was submitted; it
    raises what that plan has failed with, wherever it did. Ranks obey commands in order.
    """

    ranks: list[RankInfo]

    def submit(self, plan: StepPlan) -> None: ...
    def collect(self) -> StepResult: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


class LocalExecutor:
    """Rank 0 of 1, in this process."""

    def __init__(self, config: EngineConfig, num_slabs: int, engine_id: str) -> None:
        self._worker = Worker(config, rank=0, num_slabs=num_slabs, engine_id=engine_id)
        self.ranks = [self._worker.rank_info] if self._worker.rank_info is not None else []
        self._pending: deque[PendingStep | Exception] = deque()

    @property
    def runner(self) -> ModelRunner:
        """For benchmarks, which ask it where the time went."""
        return self._worker.runner

    def submit(self, plan: StepPlan) -> None:
        try:
            self._pending.append(self._worker.submit(plan))
        except Exception as error:  # told by collect(), after the ends of older steps
            self._pending.append(error)

    def collect(self) -> StepResult:
        pending = self._pending.popleft()
        if isinstance(pending, Exception):
            raise pending
        return pending.result()

    def post_move(self, peer: PeerInfo, command: MoveCommand) -> None:
        self._worker.post_move(peer, command)

    def give_up_move(self, request_id: str) -> None:
        self._worker.give_up_move(request_id)

    def poll_moves(self) -> list[tuple[int, MoveEvent]]:
        return [(0, event) for event in self._worker.poll_moves()]

    def check(self) -> None:
        self._worker.check()

    def close(self) -> None:
        self._worker.close()


class ProcessExecutor:
    """One process per rank; every command goes to all ranks, and all but Execute are answered."""

    def __init__(
        self,
        config: EngineConfig,
        num_slabs: int,
        engine_id: str,
        log_level: str | None = None,
        pulse_endpoint: str | None = None,
    ) -> None:
        self._folder = make_folder("tandem-ranks-")
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._events: list[tuple[int, MoveEvent]] = []
        self.ranks: list[RankInfo] = []
        try:
            for rank in range(config.parallel.tp):
                endpoint = f"ipc://{self._folder / f'rank{rank}'}"
                socket = self._context.socket(zmq.PAIR)
                socket.setsockopt(zmq.LINGER, 0)
                socket.set_hwm(0)
                socket.bind(endpoint)
                self._sockets.append(socket)
                self._poller.register(socket, zmq.POLLIN)
                settings = RankSettings(
                    config=config,
                    rank=rank,
                    endpoint=endpoint,
                    rendezvous=f"file://{self._folder / 'store'}",
                    num_slabs=num_slabs,
                    engine_id=engine_id,
                    log_level=log_level,
                    pulse_endpoint=pulse_endpoint,
                )
                self._processes.append(spawn("tandem.engine.rank_process", settings))
            for rank in range(config.parallel.tp):
                ready = self._receive(rank, START_TIMEOUT_S)
                assert isinstance(ready, RankReady), ready
                if ready.info is not None:
                    self.ranks.append(ready.info)
        except BaseException:
            self.close()
            raise

    def _receive(self, rank: int, timeout_s: float) -> RankReady | RankReply:
        """The next message of one rank; a dead or silent rank ends the engine."""
        waited_s = 0.0
        while not self._sockets[rank].poll(500):
            waited_s += 0.5
            for other, process in enumerate(self._processes):
                if process.poll() is not None and not self._sockets[rank].poll(0):
                    self._raise_failure_of(other)
                    raise EngineDeadError(
                        f"the process of rank {other} ended with status {process.returncode}"
                    )
            if waited_s >= timeout_s:
                raise EngineDeadError(f"rank {rank} did not answer within {timeout_s:.0f} s")
        message: FromRank = self._decoder.decode(self._sockets[rank].recv())
        if isinstance(message, Failure):
            raise message.error()
        return message

    def _raise_failure_of(self, rank: int) -> None:
        """A rank that ended may have said why."""
        while self._sockets[rank].poll(0):
            message: FromRank = self._decoder.decode(self._sockets[rank].recv())
            if isinstance(message, Failure):
                raise message.error()

    def _command(self, message: ToRank) -> StepResult | None:
        """Send to all ranks, take one answer from each: an unread one would answer the next.

        Raises: what the ranks failed with, if they all answered; EngineDeadError if one did not,
        because the others may then wait for it inside a collective for ever.
        """
        self._tell(message)
        replies: dict[int, FromRank] = {}
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while len(replies) < len(self._sockets):
            for socket, _ in self._poller.poll(500):
                rank = self._sockets.index(socket)
                reply = replies[rank] = self._decoder.decode(socket.recv())
                if _tells_failure(reply):
                    deadline = min(deadline, time.monotonic() + _FAILURE_GRACE_S)
            if len(replies) == len(self._sockets):
                break
            self.check()
            if time.monotonic() > deadline:
                silent = [rank for rank in range(len(self._sockets)) if rank not in replies]
                failed = [item.message for item in replies.values() if isinstance(item, Failure)]
                raise EngineDeadError(f"rank {silent[0]} did not answer; others failed: {failed}")
        result = None
        for rank, reply in sorted(replies.items()):
            if isinstance(reply, Failure):
                raise reply.error()
            assert isinstance(reply, RankReply), reply
            self._events.extend((rank, event) for event in reply.reads)
            result = reply.result if rank == 0 else result
        return result

    def _tell(self, message: ToRank) -> None:
        data = self._encoder.encode(message)
        for socket in self._sockets:
            self._send(socket, data)

    def _send(self, socket: "zmq.Socket[bytes]", data: bytes) -> None:
        """Raises: EngineDeadError if a rank has ended: a socket without a peer blocks for ever."""
        while True:
            try:
                socket.send(data, zmq.NOBLOCK)
            except zmq.Again:
                self.check()
                socket.poll(_SEND_CHECK_MS, zmq.POLLOUT)
            else:
                return

    def submit(self, plan: StepPlan) -> None:
        self._tell(Execute(plan))

    def collect(self) -> StepResult:
        result = self._command(Collect())
        assert result is not None
        return result

    def post_move(self, peer: PeerInfo, command: MoveCommand) -> None:
        self._command(PostMove(peer, command))

    def give_up_move(self, request_id: str) -> None:
        self._command(GiveUp(request_id))

    def poll_moves(self) -> list[tuple[int, MoveEvent]]:
        self._command(PollMoves())
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Raises EngineDeadError if a rank has ended: an idle engine would not notice."""
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                raise EngineDeadError(
                    f"the process of rank {rank} ended with status {process.returncode}"
                )

    def close(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            end(process)
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()
        remove_folder(self._folder)


def _tells_failure(reply: FromRank) -> bool:
    return isinstance(reply, Failure) or (isinstance(reply, RankReply) and reply.has_failed)


def start_executor(
    config: EngineConfig,
    num_slabs: int,
    engine_id: str,
    log_level: str | None = None,
    pulse_endpoint: str | None = None,
) -> Executor:
    """The executor that fits the tensor-parallel size."""
    if config.parallel.tp == 1:
        return LocalExecutor(config, num_slabs, engine_id)
    return ProcessExecutor(config, num_slabs, engine_id, log_level, pulse_endpoint)
