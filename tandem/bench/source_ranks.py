"""Ranks of prefill engines without a model, in a process of their own: arenas that peers may read.

Run by bench/move_rates.py; writes the layouts of its ranks to a pipe and stays until it is ended.
"""

import os
import threading
from typing import Any

import msgspec
import numpy as np

from tandem.engine.child import read_settings
from tandem.state.arena import build_geometry
from tandem.state.spec import StateSpec
from tandem.transfer.agent_nixl import NixlAgent
from tandem.transfer.layout import RankInfo, RankLayout
from tandem.transfer.passive import PassiveRank

_ALIGNMENT = 4096


class SourceSettings(msgspec.Struct, frozen=True):
    """Engines to stand for: the specs of each one's ranks. `answer_fd`: a pipe's end. `gpu`: whose
    memory, or the host's."""

    engines: list[list[StateSpec]]
    num_slabs: int
    answer_fd: int
    gpu: int | None = None


class BenchRank:
    """An arena that is written once, so that no page of it is missing when it is read."""

    def __init__(self, spec: StateSpec, num_slabs: int, gpu: int | None = None) -> None:
        geometry = build_geometry(
            page_tokens=spec.page_tokens,
            page_nbytes=spec.page_nbytes,
            slot_nbytes=spec.slot_nbytes,
            num_slabs=num_slabs,
        )
        nbytes = geometry.arena_nbytes + _ALIGNMENT
        if gpu is None:
            self.buffer: Any = np.full(nbytes, spec.rank + 1, dtype=np.uint8)
            address = self.buffer.ctypes.data
        else:
            import torch  # slow to import, and of no use without a GPU

            torch.cuda.set_device(gpu)
            # Random: zeros cost a GPU less to move.
            self.buffer = torch.randint(256, (nbytes,), dtype=torch.uint8, device=f"cuda:{gpu}")
            torch.cuda.synchronize(gpu)
            address = self.buffer.data_ptr()
        self.layout = RankLayout(
            address + -address % _ALIGNMENT,
            spec,
            geometry,
            memory="DRAM" if gpu is None else "VRAM",
            device_id=gpu or 0,
        )


def main() -> None:
    settings = read_settings(SourceSettings)
    kept: list[tuple[BenchRank, PassiveRank]] = []
    engines: list[list[RankInfo]] = []
    for specs in settings.engines:
        ranks = [BenchRank(spec, settings.num_slabs, settings.gpu) for spec in specs]
        sources = [PassiveRank(NixlAgent("bench-P"), rank.layout) for rank in ranks]
        kept += zip(ranks, sources, strict=True)
        engines.append([source.info for source in sources])
    with os.fdopen(settings.answer_fd, "wb") as pipe:
        pipe.write(msgspec.msgpack.encode(engines))
    threading.Event().wait()  # until the parent ends it


if __name__ == "__main__":
    main()
