"""Ranks of prefill engines without a model, in a process of their own: arenas that peers may read.

Run by bench/move_rates.py; writes the layouts of its ranks to a pipe and stays until it is ended.
"""

import os
import threading

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.engine.child import read_settings
from tandem.state.arena import build_geometry
from tandem.state.spec import StateSpec
from tandem.transfer.agent_nixl import NixlAgent
from tandem.transfer.layout import RankInfo, RankLayout
from tandem.transfer.passive import PassiveRank

_ALIGNMENT = 4096


class SourceSettings(msgspec.Struct, frozen=True):
    """Engines to stand for: the specs of each one's ranks. `answer_fd`: a pipe's end."""

    engines: list[list[StateSpec]]
    num_slabs: int
    answer_fd: int


class BenchRank:
    """An arena that is written once, so that no page of it is missing when it is read."""

    def __init__(self, spec: StateSpec, num_slabs: int) -> None:
        geometry = build_geometry(
            page_tokens=spec.page_tokens,
            page_nbytes=spec.page_nbytes,
            slot_nbytes=spec.slot_nbytes,
            num_slabs=num_slabs,
        )
        raw = np.full(geometry.arena_nbytes + _ALIGNMENT, spec.rank + 1, dtype=np.uint8)
        skip = -raw.ctypes.data % _ALIGNMENT
        self.buffer: npt.NDArray[np.uint8] = raw[skip : skip + geometry.arena_nbytes]
        self.layout = RankLayout(self.buffer.ctypes.data, spec, geometry)


def main() -> None:
    settings = read_settings(SourceSettings)
    kept: list[tuple[BenchRank, PassiveRank]] = []
    engines: list[list[RankInfo]] = []
    for specs in settings.engines:
        ranks = [BenchRank(spec, settings.num_slabs) for spec in specs]
        sources = [PassiveRank(NixlAgent("bench-P"), rank.layout) for rank in ranks]
        kept += zip(ranks, sources, strict=True)
        engines.append([source.info for source in sources])
    with os.fdopen(settings.answer_fd, "wb") as pipe:
        pipe.write(msgspec.msgpack.encode(engines))
    threading.Event().wait()  # until the parent ends it


if __name__ == "__main__":
    main()
