"""A prefill engine's ranks and a decode rank in one process, over the local agent."""

import contextlib
import random
import time
from collections.abc import Callable

import msgspec

from tandem.transfer.agent_local import LocalAgent, LocalFabric
from tandem.transfer.identity import EngineIdentity, build_model_identity, current_process
from tandem.transfer.layout import PeerInfo
from tandem.transfer.mover import RankMover
from tandem.transfer.passive import PassiveRank
from tandem.transfer.plan import Placement
from tandem.transfer.protocol import MoveCommand
from tests.unit.transfer.memory import build_rank, hybrid, pick_placement

ADDRESS = "tcp://127.0.0.1:1"


def identity(config=None, engine_id="P", generation="g1", tp=1) -> EngineIdentity:
    model = build_model_identity(config or hybrid())
    return EngineIdentity(engine_id, generation, tp, current_process(), model)


def wait_for(condition, timeout_s=5.0):
    """The first true value of `condition()`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.001)
    raise AssertionError(f"nothing within {timeout_s} s")


@contextlib.contextmanager
def closing_all(build):
    """A function that builds as `build` does; what it has built is closed in the end."""
    with contextlib.ExitStack() as stack:

        def make(*args, **kwargs):
            return stack.enter_context(contextlib.closing(build(*args, **kwargs)))

        yield make


def whole_move(
    request_id: str, peer: PeerInfo, num_tokens: int, src: Placement, dst: Placement
) -> MoveCommand:
    """A prompt's pages and its slot in one part."""
    return MoveCommand(
        request_id=request_id,
        peer=peer.key,
        part=0,
        start_token=0,
        stop_token=num_tokens,
        src_pages=tuple(src.pages),
        src_slot=src.slot,
        dst_pages=tuple(dst.pages),
        dst_slot=dst.slot,
    )


class LocalPair:
    """A source engine of `src_tp` ranks and one destination rank."""

    def __init__(self, src_tp=1, dst_tp=1, dst_rank=0, page_tokens=16, num_slabs=8):
        self.fabric = LocalFabric()
        self.config = hybrid()
        self.rng = random.Random(src_tp * 100 + dst_tp)
        self.num_slabs = num_slabs
        self.page_tokens = page_tokens
        self.sources = [
            build_rank(self.config, src_tp, rank, page_tokens, num_slabs) for rank in range(src_tp)
        ]
        self.target = build_rank(self.config, dst_tp, dst_rank, page_tokens, num_slabs)
        self.peer = self.start_engine("g1")
        self.reader = RankMover(LocalAgent(self.fabric, "D"), self.target.layout)

    @property
    def agent_names(self) -> list[str]:
        """Of the peer's ranks."""
        return [info.agent_name for info in self.peer.ranks]

    def hold(self) -> None:
        """Reads from the peer's ranks do not move until `fabric.held` is cleared."""
        self.fabric.held.update(self.agent_names)

    def start_engine(self, generation: str) -> PeerInfo:
        """Agents for the source ranks, as a start or a restart makes them."""
        ranks = [
            PassiveRank(LocalAgent(self.fabric, f"P{rank}"), source.layout).info
            for rank, source in enumerate(self.sources)
        ]
        return PeerInfo("P", generation, ADDRESS, current_process(), tuple(ranks))

    def prepare(self, request_id: str, num_tokens: int, seed: int):
        """Write a prompt's state at the sources; returns the command and where it goes."""
        src = pick_placement(self.sources[0].geometry, num_tokens, self.rng)
        dst = pick_placement(self.target.geometry, num_tokens, self.rng)
        for source in self.sources:
            source.write(seed, num_tokens, src)
        command = whole_move(request_id, self.peer, num_tokens, src, dst)
        return command, dst

    def read(self, request_id="r", num_tokens=5, seed=3) -> Callable[[], None]:
        """Post a read of a prompt that is written for it. What is returned asserts that its state
        has arrived, and that nothing else has changed since."""
        command, dst = self.prepare(request_id, num_tokens, seed)
        before = self.target.buffer.copy()
        self.reader.post(command)
        return lambda: self.target.check(before, seed, num_tokens, dst)

    def parts(self, command: MoveCommand, *borders: int) -> list[MoveCommand]:
        """The same read in parts that end at each border and at the end; the last has the slot."""
        edges = [0, *borders, command.stop_token]
        last = len(borders)
        return [
            msgspec.structs.replace(
                command,
                part=part,
                start_token=edges[part],
                stop_token=edges[part + 1],
                src_slot=command.src_slot if part == last else None,
                dst_slot=command.dst_slot if part == last else None,
            )
            for part in range(last + 1)
        ]

    def event(self, timeout_s=5.0):
        """The next event; there must be exactly one."""
        (event,) = wait_for(self.reader.poll, timeout_s)
        return event

    def close(self) -> None:
        self.fabric.held.clear()
        self.reader.close()
