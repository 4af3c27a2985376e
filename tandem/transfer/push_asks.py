"""What a decode engine has asked one prefill engine to write, and not been told the end of.

Memory that a prefill engine may write to is quiet only when that engine has said that nothing is
in flight, or when its processes are proven dead. Used by the thread of ticket_client.py alone; it
sends nothing itself.
"""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from tandem.log import get_logger
from tandem.transfer.identity import is_proven_dead
from tandem.transfer.layout import PeerInfo
from tandem.transfer.protocol import (
    MoveCommand,
    MoveEvent,
    PushReply,
    PushRequest,
    PushStop,
    Refusal,
    Reply,
)

log = get_logger(__name__)

# How often the processes of a prefill engine are looked for that does not say how a push ended,
# and for how long after its death, or a failure of its transport, bytes may be on their way to us.
_DEATH_CHECK_S = 0.5
_GRACE_S = 5.0


@dataclass
class _Push:
    push_id: str
    peer: PeerInfo
    parts: dict[int, PushRequest] = field(default_factory=dict)  # that have no end yet
    stop: PushStop | None = None
    is_uncertain: bool = False  # bytes may be on their way, or the peer would not say
    quiet_at: float | None = None


class PushAsks:
    """Pushes by our request id.

    Args:
        reader: (engine_id, generation) of this decode engine.
        next_sequence: numbers for messages of the channel.
        tell: called with each end: "done" and "failed" of parts, "drained" of a request's push.
    """

    def __init__(
        self,
        reader: tuple[str, str],
        next_sequence: Callable[[], int],
        tell: Callable[[MoveEvent], None],
    ) -> None:
        self._reader = reader
        self._next_sequence = next_sequence
        self._tell = tell
        self._pushes: dict[str, _Push] = {}
        self._next_death_check = 0.0

    @property
    def is_busy(self) -> bool:
        return bool(self._pushes)

    def knows(self, request_id: str) -> bool:
        return request_id in self._pushes

    def post(self, peer: PeerInfo, command: MoveCommand) -> None:
        """Ask for a part. The source places of the command are the peer's own business."""
        request_id = command.request_id
        push = self._pushes.get(request_id)
        if push is None:
            push = self._pushes[request_id] = _Push(uuid.uuid4().hex, peer)
        assert push.stop is None, f"request {request_id} was given up"
        push.parts[command.part] = PushRequest(
            sequence=self._next_sequence(),
            ticket_id=command.ticket_id,
            generation=peer.generation,
            reader=self._reader,
            push_id=push.push_id,
            part=command.part,
            attempt=command.attempt,
            start_token=command.start_token,
            stop_token=command.stop_token,
            dst_pages=command.dst_pages,
            dst_slot=command.dst_slot,
        )

    def give_up(self, request_id: str) -> list[int]:
        """Let nothing more be written for a request: "drained" follows when its memory is quiet.

        Returns: the numbers of messages that need no answer any more.
        """
        push = self._pushes.get(request_id)
        if push is None:
            self._tell(MoveEvent(request_id, "drained"))
            return []
        dropped = [request.sequence for request in push.parts.values()]
        push.parts.clear()
        if push.stop is None:
            push.stop = PushStop(
                self._next_sequence(), push.peer.generation, self._reader, push.push_id
            )
        return dropped

    def due(self) -> Iterator[PushRequest | PushStop]:
        """All that has no answer yet."""
        for push in self._pushes.values():
            yield from push.parts.values()
            if push.stop is not None and push.quiet_at is None:
                yield push.stop

    def on_reply(self, reply: Reply, now: float) -> bool:
        """Take an answer; False if it is to none of ours."""
        for request_id, push in list(self._pushes.items()):
            if push.stop is not None and push.stop.sequence == reply.sequence:
                self._on_stop(request_id, push, reply, now)
                return True
            for request in push.parts.values():
                if request.sequence == reply.sequence:
                    self._on_part(request_id, push, request.part, reply)
                    return True
        return False

    def _on_part(self, request_id: str, push: _Push, part: int, reply: Reply) -> None:
        if isinstance(reply, PushReply):
            event = msgspec.structs.replace(reply.event, request_id=request_id, part=part)
        else:
            # It may have been taken before it was refused: only the answer to a stop is certain.
            error = reply.message if isinstance(reply, Refusal) else "the push got no answer"
            event = MoveEvent(
                request_id,
                "failed",
                error=error,
                is_peer_lost=True,
                part=part,
                has_transport_failed=True,
            )
        del push.parts[part]
        push.is_uncertain = push.is_uncertain or event.has_transport_failed
        if not push.parts and not push.is_uncertain:
            del self._pushes[request_id]
        self._tell(event)

    def _on_stop(self, request_id: str, push: _Push, reply: Reply, now: float) -> None:
        """A refusal is no answer: another incarnation does not know what the one before it left in
        flight."""
        if not isinstance(reply, PushReply) or push.quiet_at is not None:
            return
        # The transport of whoever writes has failed: what it had sent may not have come yet.
        push.quiet_at = now + _GRACE_S if reply.event.has_transport_failed else now

    def refuse_all(self, message: str) -> None:
        """Nothing can be asked of the peer: its parts fail; stops go on waiting for its death."""
        for request_id, push in list(self._pushes.items()):
            for part, request in list(push.parts.items()):
                self._on_part(request_id, push, part, Refusal(request.sequence, message, ""))

    def advance(self, now: float) -> None:
        """Look for the deaths of those who do not answer, and tell what has become quiet."""
        is_time_to_look = now >= self._next_death_check
        if is_time_to_look:
            self._next_death_check = now + _DEATH_CHECK_S
        for request_id, push in list(self._pushes.items()):
            if push.stop is None:
                continue
            if push.quiet_at is None and is_time_to_look and _is_dead(push.peer):
                log.info("prefill engine %s ended while it wrote", push.peer.engine_id)
                push.quiet_at = now + _GRACE_S
            if push.quiet_at is not None and now >= push.quiet_at:
                del self._pushes[request_id]
                self._tell(MoveEvent(request_id, "drained"))


def _is_dead(peer: PeerInfo) -> bool:
    processes = [peer.process, *(info.process for info in peer.ranks)]
    return all(is_proven_dead(process) for process in processes)
