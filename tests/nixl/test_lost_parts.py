"""An engine that has lost a part ends at its next heartbeat, with requests or without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.config.args import build_config
from tandem.engine.engine import EngineCore
from tandem.errors import EngineDeadError
from tests.tiny_models import save_tiny


def end_transfer_thread(core: EngineCore) -> None:
    core._executor._worker._mover.close()  # type: ignore[attr-defined]


def end_side_channel(core: EngineCore) -> None:
    (core._server or core._client).close()  # type: ignore[union-attr]


def end_rank(core: EngineCore) -> None:
    process = core._executor._processes[1]  # type: ignore[attr-defined]
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("settings", "end_part", "words"),
    [
        ({"role": "decode"}, end_transfer_thread, "transfer thread"),
        ({"role": "decode"}, end_side_channel, "side channel"),
        ({"role": "prefill"}, end_side_channel, "side channel"),
        ({"tp": 2}, end_rank, "rank 1 ended with status -9"),
    ],
)
def test_a_lost_part_ends_an_idle_engine(
    tmp_path: Path, settings: dict[str, Any], end_part: Callable[[EngineCore], None], words: str
) -> None:
    folder = save_tiny("nemotron_h", tmp_path)
    core = EngineCore(build_config(str(folder), {"arena_mib": 1, "threads": 1, **settings}))
    try:
        assert core.not_ready() is None
        end_part(core)
        with pytest.raises(EngineDeadError, match=words):
            core.not_ready()
    finally:
        core.close()
