"""The benchmark of a pair runs, on a tiny model and a machine that was not measured."""

from pathlib import Path

import pytest

from tandem.bench import pair
from tandem.bench.limits import Machine
from tandem.config.args import build_config
from tests.tiny_models import save_tiny


@pytest.mark.slow
@pytest.mark.nixl
def test_both_engines_are_timed_alone_and_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "measure_machine", lambda threads: Machine(1e10, 1e11, threads))
    result = pair.run_pair(
        build_config(str(save_tiny("nemotron_h", tmp_path)), {"arena_mib": 8}),
        prefill_tokens=64,
        batches=[1, 2],
        num_steps=40,
    )
    assert [row["what"] for row in result["rows"]] == [
        "P: prefill 64",
        "D: decode batch 1",
        "D: decode batch 2",
        "P while D decodes",
        "D: batch 2 while P works",
    ]
    assert result["threads"] == 1
    for row in result["rows"]:
        assert row["tokens_per_s"] > 0
        assert row["floor_tokens_per_s"] > 0
