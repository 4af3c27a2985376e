"""What is measured is written after each search; measuring itself needs a GPU (tests/gpu)."""

import json
from pathlib import Path

import pytest
import torch

from tandem.bench import tune
from tandem.bench.tune import Search, grid, run_tune, searches
from tandem.ops.tuning import FOLDER, load


def test_every_combination_is_a_candidate() -> None:
    assert grid(BM=(16, 32), BK=(64,)) == ({"BM": 16, "BK": 64}, {"BM": 32, "BK": 64})


def test_searches_of_an_op_ascend() -> None:
    found: dict[str, list[int]] = {}
    for search in searches():
        found.setdefault(search.op, []).append(search.upto)
        assert search.candidates
    layers = {op for op in found if op.startswith("linear_")}
    assert "linear_10304x2688" in layers
    assert set(found) - layers == {
        "experts_product",
        "experts_few_up",
        "experts_few_down",
        "experts_hopper_product",
        "experts_router",
        "experts_router_many",
        "attention_decode",
        "attention_prefill",
        "ssd_update",
    }
    assert all(sizes == sorted(set(sizes)) for sizes in found.values())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")) or [None])
def test_shipped_tiles_are_candidates_of_their_search(path: Path | None) -> None:
    if path is None:
        pytest.skip("no GPU has been tuned yet")
    known = {(search.op, search.upto): search.candidates for search in searches()}
    for op, entries in load(path).items():
        for upto, tiles in entries:
            assert tiles is None or tiles in known[op, upto]


def test_each_entry_is_in_the_file_before_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"
    old = {"kept": [{"upto": 1, "tiles": {"BM": 1}}], "ssd_update": [{"upto": 9, "tiles": None}]}
    path.write_text(json.dumps({"device": "old", "tiles": old}))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    monkeypatch.setattr(tune, "version", lambda name: "1.2")
    seen = []

    def measure(search: Search) -> dict:
        seen.append(len(json.loads(path.read_text())["tiles"]["ssd_update"]))
        return {"upto": search.upto, "tiles": {"BP": 8}, "us": 1.0, "default_us": 2.0}

    monkeypatch.setattr(tune, "measure", measure)
    content = run_tune("ssd", path)
    assert seen == [1, 1, 2]  # the old entry until the first is measured
    assert json.loads(path.read_text()) == content
    assert (content["device"], content["triton"]) == ("NVIDIA Test", "1.2")
    assert load(path) == {
        "kept": [(1, {"BM": 1})],
        "ssd_update": [(1, {"BP": 8}), (8, {"BP": 8}), (256, {"BP": 8})],
    }
