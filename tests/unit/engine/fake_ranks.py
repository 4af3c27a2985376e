"""Ranks that record what they are to move, and tell what a test wants them to."""

from tandem.transfer.layout import PeerInfo
from tandem.transfer.protocol import MoveCommand, MoveEvent


class FakeRanks:
    """`events`, by rank, are what poll_moves() hands out. All moves must be of `peer`."""

    def __init__(self, peer: PeerInfo) -> None:
        self._peer = peer
        self.events: list[tuple[int, MoveEvent]] = []
        self.posted: list[MoveCommand] = []
        self.given_up: list[str] = []

    def post_move(self, peer: PeerInfo, command: MoveCommand) -> None:
        assert peer is self._peer
        self.posted.append(command)

    def give_up_move(self, request_id: str) -> None:
        self.given_up.append(request_id)

    def poll_moves(self) -> list[tuple[int, MoveEvent]]:
        events, self.events = self.events, []
        return events
