import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.errors import ModelError
from tandem.models import weights_digest as module
from tandem.models.weights import weight_files
from tandem.models.weights_digest import digest_weights
from tests.tiny_models import save_tiny


def digest(folder: Path) -> str:
    return digest_weights(weight_files(folder))


def test_copies_agree_however_they_are_cut_into_files(tmp_path: Path) -> None:
    whole = save_tiny("bamba", tmp_path / "whole")
    sharded = save_tiny("bamba", tmp_path / "sharded", max_shard_size="100KB")
    assert len(weight_files(sharded)) > 1
    assert digest(whole) == digest(sharded)


def test_other_weights_of_the_same_shapes_differ(tmp_path: Path) -> None:
    folders = [save_tiny("bamba", tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    assert digest(folders[0]) != digest(folders[1])


def test_one_tensor_that_was_trained_on_shows(tmp_path: Path) -> None:
    folder = save_tiny("bamba", tmp_path)
    (file,) = weight_files(folder)
    before = digest(folder)
    tensors = load_file(file)
    for name in tensors:
        changed = {**tensors, name: tensors[name] + 0.001 * torch.randn(tensors[name].shape)}
        save_file(changed, file)
        assert digest(folder) != before, name


@pytest.mark.parametrize("change", ["name", "dtype", "shape"])
def test_names_dtypes_and_shapes_count(tmp_path: Path, change: str) -> None:
    found = []
    for name, tensor in (
        ("a", torch.zeros(4, 6)),
        {
            "name": ("b", torch.zeros(4, 6)),
            "dtype": ("a", torch.zeros(4, 6, dtype=torch.int32)),
            "shape": ("a", torch.zeros(6, 4)),
        }[change],
    ):
        save_file({name: tensor}, tmp_path / "model.safetensors")
        found.append(digest(tmp_path))
    assert found[0] != found[1]


def test_of_very_many_tensors_some_are_sampled_and_all_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_SAMPLES", 4)
    reads = []
    sample = module._sample
    monkeypatch.setattr(module, "_sample", lambda *args: reads.append(args) or sample(*args))
    tensors = {f"t{index}": torch.zeros(index % 3) for index in range(10)}  # some are empty
    save_file(tensors, tmp_path / "model.safetensors")
    before = digest(tmp_path)
    assert len(reads) == 4
    save_file({**tensors, "t10": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert digest(tmp_path) != before


def test_twenty_thousand_tensors_take_less_than_a_second_of_this_process(tmp_path: Path) -> None:
    """As many as the experts of a large mixture have."""
    value = torch.zeros(64)
    tensors = {f"model.layers.{index}.experts.up": value.clone() for index in range(20_000)}
    save_file(tensors, tmp_path / "model.safetensors")
    start = time.process_time()
    digest(tmp_path)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("nbytes", [0, 4, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, nbytes: int) -> None:
    (file,) = weight_files(save_tiny("bamba", tmp_path))
    content = file.read_bytes()
    file.write_bytes(content[: nbytes if nbytes >= 0 else len(content) * 3 // 4])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        digest(tmp_path)
