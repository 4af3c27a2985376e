"""Decode engines that a prefill engine may write to, and the answers that they wait for.

Used by the thread of ticket_server.py alone, which sends them.
"""

from collections.abc import Iterator, Sequence

from tandem.errors import HandshakeError
from tandem.transfer.identity import EngineIdentity
from tandem.transfer.layout import PeerInfo, RankInfo, check_peer
from tandem.transfer.protocol import PushReply, PushRequest, PushStop
from tandem.transfer.push_board import PushBoard, PushKey

# Incarnations that are remembered; one beyond is the longest silent, and says hello again.
_MAX_READERS = 256
# Answers that are waited for: bounded by the parts that go on, but for stops.
_MAX_WAITING = 1 << 16


class PushAnswers:
    """Questions of decode engines about pushes, on their way to the board and back."""

    def __init__(self, board: PushBoard) -> None:
        self._board = board
        self._readers: dict[tuple[str, str], PeerInfo] = {}
        # By push and part (None: its stop): who asked last, and the number of the question.
        self._waiting: dict[tuple[PushKey, int | None], tuple[bytes, int]] = {}

    def meet(self, identity: EngineIdentity, ranks: Sequence[RankInfo]) -> None:
        """Remember where a decode engine's arenas lie. Raises: HandshakeError for wrong layouts."""
        name = f"decode engine {identity.engine_id}"
        reader = PeerInfo(
            identity.engine_id, identity.generation, name, identity.process, tuple(ranks)
        )
        check_peer(reader)
        self._remember(reader)

    def _remember(self, reader: PeerInfo) -> None:
        self._readers.pop(reader.key, None)
        while len(self._readers) >= _MAX_READERS:
            del self._readers[next(iter(self._readers))]
        self._readers[reader.key] = reader

    def ask(self, asker: bytes, request: PushRequest | PushStop) -> PushReply | None:
        """The answer if there is one already; else it is among `due` later.

        Raises: HandshakeError for a reader that is not met, TransferError if too many parts go on.
        """
        key = (*request.reader, request.push_id)
        if isinstance(request, PushStop):
            event, part = self._board.stop(request.reader, request.push_id), None
        else:
            reader = self._readers.get(request.reader)
            if reader is None:
                raise HandshakeError(
                    f"decode engine {request.reader[0]} (generation {request.reader[1]}) has not "
                    "said hello here"
                )
            self._remember(reader)
            event, part = self._board.ask(reader, request), request.part
        if event is not None:
            return PushReply(request.sequence, event)
        if len(self._waiting) < _MAX_WAITING:
            self._waiting[key, part] = asker, request.sequence
        return None

    def due(self) -> Iterator[tuple[bytes, PushReply]]:
        """The answers that there are now, each once, with their askers."""
        for (key, part), (asker, sequence) in list(self._waiting.items()):
            event = self._board.end_of(key, part)
            if event is not None:
                del self._waiting[key, part]
                yield asker, PushReply(sequence, event)
