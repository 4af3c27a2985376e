"""How fast state moves between the ranks of two engines: bytes, descriptors and GB/s for one
prompt, beside what the machine copies within a process.

The ranks hold arenas of the model's shapes and no model. Sources are another process; each
destination rank reads with a transfer thread of its own, as in an engine.
"""

import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from tandem.bench.source_ranks import BenchRank, SourceSettings
from tandem.config.model import ModelConfig
from tandem.engine.child import end, spawn
from tandem.errors import ShardingError, TransferError
from tandem.state.arena import ArenaGeometry, build_geometry
from tandem.state.spec import StateSpec, build_state_spec
from tandem.transfer.agent_nixl import NixlAgent
from tandem.transfer.identity import current_process
from tandem.transfer.layout import PeerInfo, RankInfo
from tandem.transfer.mover import RankMover
from tandem.transfer.protocol import MoveCommand, MoveEvent
from tandem.units import ceil_div

PAIRS = ((1, 1), (2, 2), (1, 2), (2, 1))
# All of it is beyond caches; a piece is copied between two turns of a busy machine's other
# processes.
_COPY_NBYTES = 256 << 20
_PIECE_NBYTES = 8 << 20
_NUM_COPIES = 20
_MOVE_S = 60.0


@dataclass(frozen=True)
class MoveRate:
    """One prompt's state, moved to all ranks of the destination: median and best of some rounds."""

    prefill_tp: int
    decode_tp: int
    placement: str  # contiguous, or scattered: no page lies beside the next
    nbytes: int
    num_descriptors: int
    seconds: float
    best_s: float
    thread_s: float  # median on the transfer thread alone, from post to found done

    @property
    def best_gbytes_per_s(self) -> float:
        """As the rate of a copy, which is the best of several too."""
        return self.nbytes / self.best_s / 1e9


def measure_copy() -> float:
    """Bytes a second that one thread copies between two places in memory: the best piece."""
    source = np.full(_COPY_NBYTES, 1, dtype=np.uint8)
    target = np.full(_COPY_NBYTES, 2, dtype=np.uint8)
    times = []
    for first in range(0, _COPY_NBYTES, _PIECE_NBYTES):
        piece = slice(first, first + _PIECE_NBYTES)
        start = time.perf_counter()
        np.copyto(target[piece], source[piece])
        times.append(time.perf_counter() - start)
    return _PIECE_NBYTES / min(times)


def measure_gpu_copy(source_gpu: int, target_gpu: int, nbytes: int = _COPY_NBYTES) -> float:
    """Bytes a second of torch's own copy from one GPU to another: the best of some."""
    import torch

    source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=f"cuda:{source_gpu}")
    target = torch.zeros_like(source, device=f"cuda:{target_gpu}")
    times = []
    for _ in range(_NUM_COPIES):
        torch.cuda.synchronize(source_gpu)
        torch.cuda.synchronize(target_gpu)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(source_gpu)
        torch.cuda.synchronize(target_gpu)
        times.append(time.perf_counter() - start)
    return nbytes / min(times)


def measure_moves(
    model: ModelConfig,
    *,
    num_tokens: int,
    page_tokens: int,
    num_rounds: int,
    pairs: Sequence[tuple[int, int]] = PAIRS,
    gpus: tuple[int, int] | None = None,
) -> tuple[list[MoveRate], float]:
    """Contiguous and scattered pages between each pair of sizes that the model divides by; and the
    best rate of `measure_copy` beside them, in bytes a second. `gpus`: those of source and
    destination; without them, state lies in the host's memory.

    Raises: TransferError if a read fails or the sources do not start.
    """
    specs = {
        tp: _specs(model, tp, page_tokens) for tp in sorted({tp for pair in pairs for tp in pair})
    }
    pairs = [pair for pair in pairs if all(specs[tp] for tp in pair)]
    one = _geometry(next(found for found in specs.values() if found)[0], 1)
    # Room to leave every other page out, and the slot.
    num_slabs = one.slabs_for(2 * ceil_div(num_tokens, page_tokens), 2) + 1
    sizes = [tp for tp in specs if specs[tp]]
    copy = measure_copy if gpus is None else partial(measure_gpu_copy, *gpus)
    with _Sources([specs[tp] for tp in sizes], num_slabs, gpus and gpus[0]) as sources:
        engines = dict(zip(sizes, sources.engines, strict=True))
        rates, copies = [], [copy()]
        for prefill_tp, decode_tp in pairs:
            reader = _Reader(engines[prefill_tp], specs[decode_tp], num_slabs, gpus and gpus[1])
            try:
                rates += [
                    reader.measure(placement, num_tokens, num_rounds)
                    for placement in ("contiguous", "scattered")
                ]
            finally:
                reader.close()
            copies.append(copy())
        return rates, max(copies)


def _specs(model: ModelConfig, tp: int, page_tokens: int) -> list[StateSpec]:
    """The ranks of an engine; none if the model does not divide by `tp`."""
    try:
        return [
            build_state_spec(model, tp=tp, rank=rank, page_tokens=page_tokens) for rank in range(tp)
        ]
    except ShardingError:
        return []


def _geometry(spec: StateSpec, num_slabs: int) -> ArenaGeometry:
    return build_geometry(
        page_tokens=spec.page_tokens,
        page_nbytes=spec.page_nbytes,
        slot_nbytes=spec.slot_nbytes,
        num_slabs=num_slabs,
    )


class _Sources:
    """The process of the source ranks; `engines` are theirs, in the order of the specs."""

    def __init__(self, engines: Sequence[list[StateSpec]], num_slabs: int, gpu: int | None) -> None:
        answer, answer_fd = os.pipe()
        settings = SourceSettings(list(engines), num_slabs, answer_fd, gpu)
        self._process = spawn("tandem.bench.source_ranks", settings, pass_fds=[answer_fd])
        os.close(answer_fd)
        with os.fdopen(answer, "rb") as pipe:
            found = pipe.read()
        if not found:
            end(self._process)
            raise TransferError("the source ranks did not start; their own message is above")
        self.engines = msgspec.msgpack.decode(found, type=list[list[RankInfo]])

    def __enter__(self) -> "_Sources":
        return self

    def __exit__(self, *error: object) -> None:
        end(self._process)


class _Reader:
    """All ranks of a destination, each with a thread and an agent."""

    def __init__(
        self, sources: list[RankInfo], specs: list[StateSpec], num_slabs: int, gpu: int | None
    ) -> None:
        self._sources = sources
        self._geometry = _geometry(specs[0], num_slabs)
        self._peer = PeerInfo(
            f"P{len(sources)}", "bench", "tcp://127.0.0.1:0", current_process(), tuple(sources)
        )
        self._ranks = [BenchRank(spec, num_slabs, gpu) for spec in specs]
        on_start = None if gpu is None else partial(_use_gpu, gpu)
        self._movers = [
            RankMover(NixlAgent("bench-D"), rank.layout, on_start=on_start) for rank in self._ranks
        ]
        for mover in self._movers:
            mover.add_peer(self._peer)

    def measure(self, placement: str, num_tokens: int, num_rounds: int) -> MoveRate:
        times, thread_times, events = [], [], []
        for index in range(num_rounds + 1):
            command = self._command(f"{placement}-{index}", placement, num_tokens)
            start = time.perf_counter()
            for mover in self._movers:
                mover.post(command)
            events = [_wait(mover) for mover in self._movers]
            if index:  # the first one connects
                times.append(time.perf_counter() - start)
                thread_times.append(max(event.seconds for event in events))
        return MoveRate(
            prefill_tp=len(self._sources),
            decode_tp=len(self._movers),
            placement=placement,
            nbytes=sum(event.nbytes for event in events),
            num_descriptors=sum(event.num_descriptors for event in events),
            seconds=statistics.median(times),
            best_s=min(times),
            thread_s=statistics.median(thread_times),
        )

    def _command(self, request_id: str, placement: str, num_tokens: int) -> MoveCommand:
        source = self._sources[0].layout.geometry
        return MoveCommand(
            request_id=request_id,
            peer=self._peer.key,
            part=0,
            start_token=0,
            stop_token=num_tokens,
            src_pages=_pages(source, placement, num_tokens, seed=1),
            src_slot=_last_slot(source),
            dst_pages=_pages(self._geometry, placement, num_tokens, seed=2),
            dst_slot=_last_slot(self._geometry),
        )

    def close(self) -> None:
        for mover in self._movers:
            mover.close()


def _use_gpu(gpu: int) -> None:
    import torch

    torch.cuda.set_device(gpu)


def _pages(geometry: ArenaGeometry, placement: str, num_tokens: int, seed: int) -> tuple[int, ...]:
    count = ceil_div(num_tokens, geometry.page_tokens) if geometry.num_pages else 0
    if placement == "contiguous":
        return tuple(range(count))
    pages = list(range(0, 2 * count, 2))
    random.Random(seed).shuffle(pages)
    return tuple(pages)


def _last_slot(geometry: ArenaGeometry) -> int | None:
    return geometry.num_slots - 1 if geometry.num_slots else None


def _wait(mover: RankMover) -> MoveEvent:
    deadline = time.monotonic() + _MOVE_S
    while time.monotonic() < deadline:
        for event in mover.poll():
            if event.status != "done":
                raise TransferError(f"a read of the benchmark failed: {event.error}")
            return event
        time.sleep(50e-6)
    raise TransferError(f"a read of the benchmark did not end within {_MOVE_S:.0f} s")
