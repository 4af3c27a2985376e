"""Tiles come from the GPU's file where it has them, else they are the defaults."""

import json
from pathlib import Path

import pytest
import torch

from tandem.ops import tuning
from tandem.ops.tuning import FOLDER, file_of, load, trying, tuned

DEFAULT = {"BM": 16}
GPU = torch.device("cuda", 0)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gpu.json"
    entries = [
        {"upto": 4, "tiles": {"BM": 32}},
        {"upto": 8, "tiles": None},
        {"upto": 64, "tiles": {"BM": 64}},
    ]
    path.write_text(json.dumps({"device": "x", "tiles": {"product": entries}}))
    monkeypatch.setattr(tuning, "_table_of", lambda device: load(path))
    return path


@pytest.mark.parametrize(
    ("size", "expected"), [(1, 32), (4, 32), (5, 16), (8, 16), (9, 64), (64, 64), (65, 16)]
)
def test_the_first_entry_that_holds_the_size_counts(table: Path, size: int, expected: int) -> None:
    assert tuned("product", size, GPU, DEFAULT) == {"BM": expected}


def test_ops_that_were_not_measured_keep_their_defaults(table: Path) -> None:
    assert tuned("other", 1, GPU, DEFAULT) is DEFAULT


def test_what_is_tried_goes_before_the_file_and_ends(table: Path) -> None:
    with trying("product", {"BM": 128}):
        assert tuned("product", 1, GPU, DEFAULT) == {"BM": 128}
        assert tuned("other", 1, GPU, DEFAULT) is DEFAULT
    assert tuned("product", 1, GPU, DEFAULT) == {"BM": 32}
    with trying("product", None):
        assert tuned("product", 1, GPU, DEFAULT) == {"BM": 32}


def test_a_cpu_and_a_gpu_without_a_file_run_with_defaults(tmp_path: Path) -> None:
    assert tuned("experts_product", 1, torch.device("cpu"), DEFAULT) is DEFAULT
    assert load(tmp_path / "none.json") == {}


def test_files_are_named_after_their_gpu() -> None:
    assert file_of("NVIDIA H200") == FOLDER / "nvidia-h200.json"
    assert file_of("NVIDIA GeForce RTX 4090 (Laptop)").name == (
        "nvidia-geforce-rtx-4090-laptop.json"
    )


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")) or [None])
def test_shipped_files_are_ascending_and_whole(path: Path | None) -> None:
    if path is None:
        pytest.skip("no GPU has been tuned yet")
    content = json.loads(path.read_text())
    assert file_of(content["device"]) == path
    for entries in load(path).values():
        sizes = [upto for upto, _ in entries]
        assert sizes == sorted(set(sizes))
        assert all(tiles is None or min(tiles.values()) > 0 for _, tiles in entries)
