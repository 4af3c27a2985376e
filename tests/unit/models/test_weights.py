import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.errors import ModelError
from tandem.layers.weight import Piece, Weight, norm_weight, part, whole
from tandem.models import weights as module
from tandem.models.weights import Checkpoint, load_weights

CPU = torch.device("cpu")


def write(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    """Shards with an index, as transformers writes them."""
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    index = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def load(folder: Path, wanted: dict[str, Weight], **options) -> dict[str, torch.Tensor]:
    return load_weights(Checkpoint(folder), wanted, CPU, show_progress=False, **options)


@pytest.fixture
def table() -> torch.Tensor:
    return torch.arange(60, dtype=torch.float32).view(10, 6)


@pytest.mark.parametrize("block_nbytes", [1, 60, 1 << 20])
@pytest.mark.parametrize("mapped_nbytes", [1, 1 << 20])
def test_only_the_declared_parts_are_read_in_any_blocks(
    tmp_path: Path,
    table: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    block_nbytes: int,
    mapped_nbytes: int,
) -> None:
    monkeypatch.setattr(module, "_BLOCK_NBYTES", block_nbytes)
    monkeypatch.setattr(module, "_MAPPED_NBYTES", mapped_nbytes)
    write(tmp_path, {"model-1.safetensors": {"a": table}, "model-2.safetensors": {"b": -table}})
    a, b = Piece("a", (10, 6), 0, ((1, 3), (7, 8))), Piece("b", (10, 6))
    found = load(
        tmp_path,
        {
            "joined": Weight((a, b), torch.float32),
            "columns": part("a", (10, 6), torch.float32, (2, 5), axis=1),
            "stacked": Weight(
                (Piece("a", (10, 6), 1, ((0, 2),)), Piece("b", (10, 6), 1, ((4, 6),))),
                torch.float32,
                is_stacked=True,
            ),
            "padded": Weight((Piece("a", (10, 6), 0, ((8, 10),)),), torch.float32, num_rows=4),
            "none_of_it": Weight((Piece("a", (10, 6), 0, ((10, 10),)),), torch.float32, num_rows=2),
        },
    )
    assert torch.equal(found["joined"], torch.cat([table[1:3], table[7:8], -table]))
    assert torch.equal(found["columns"], table[:, 2:5])
    assert torch.equal(found["stacked"], torch.stack([table[:, :2], -table[:, 4:6]]))
    assert torch.equal(found["padded"], torch.cat([table[8:], torch.zeros(2, 6)]))
    assert torch.equal(found["none_of_it"], torch.zeros(2, 6))


def test_entries_of_a_stacked_tensor_are_joined_scaled_and_moved(
    tmp_path: Path, table: torch.Tensor
) -> None:
    stacked = torch.stack([table, table + 100, table + 200])
    tensors = {"experts": stacked, "deep": stacked.clone(), "v": table[:, 0].clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    pieces = [
        Piece("experts", (10, 6), 0, (rows,), entry=entry)
        for entry in range(3)
        for rows in ((5, 7), (0, 2))
    ]
    scaled = Piece("experts", (10, 6), 0, ((0, 1), (4, 6)), scales=(2.0, 0.5), entry=1)
    columns = Piece("experts", (10, 6), 1, ((2, 4),), entry=2)
    depth = Piece("deep", (3, 10, 6), 2, ((1, 2), (4, 6)))
    found = load(
        tmp_path,
        {
            "stack": Weight(tuple(pieces), torch.float32, is_stacked=True, pieces_each=2),
            "scaled": Weight((scaled,), torch.float32),
            "columns": Weight((columns,), torch.float32),
            "depth": Weight((depth,), torch.float32),
            "moved": norm_weight("v", 10, torch.float32, 1.0),
        },
    )
    assert torch.equal(found["stack"], torch.cat([stacked[:, 5:7], stacked[:, :2]], dim=1))
    assert torch.equal(found["scaled"], torch.cat([stacked[1, :1] * 2, stacked[1, 4:6] / 2]))
    assert torch.equal(found["columns"], stacked[2, :, 2:4])
    assert torch.equal(found["depth"], stacked[:, :, [1, 4, 5]])
    assert torch.equal(found["moved"], table[:, 0] + 1)


def test_a_stacked_tensor_with_more_entries_is_refused(tmp_path: Path, table: torch.Tensor) -> None:
    save_file({"experts": torch.stack([table] * 3)}, tmp_path / "model.safetensors")
    pieces = tuple(Piece("experts", (10, 6), entry=entry) for entry in range(2))
    with pytest.raises(ModelError, match=r"experts is \[3, 10, 6\], expected \[2, 10, 6\]"):
        load(tmp_path, {"stack": Weight(pieces, torch.float32, is_stacked=True)})


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_dtype_is_converted(
    tmp_path: Path, table: torch.Tensor, stored: torch.dtype, wanted: torch.dtype
) -> None:
    save_file({"a": (table / 7).to(stored)}, tmp_path / "model.safetensors")
    found = load(tmp_path, {"a": whole("a", (10, 6), wanted)})["a"]
    assert torch.equal(found, (table / 7).to(stored).to(wanted))
    # Nothing may still lie in the mapped file, which is closed.
    assert found.untyped_storage().nbytes() == found.nbytes


def test_everything_that_does_not_fit_is_listed_at_once(
    tmp_path: Path, table: torch.Tensor
) -> None:
    tensors = {name: table.clone() for name in ("a", "b", "stray")}
    tensors["q"] = torch.zeros(3, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    names = {"a": (10, 6), "b": (6, 10), "q": (3,), "gone": (1,), "lost": (2,)}
    wanted = {name: whole(name, shape, torch.float32) for name, shape in names.items()}
    with pytest.raises(ModelError) as caught:
        load(tmp_path, wanted)
    message = str(caught.value)
    assert "2 missing: gone, lost" in message
    assert "1 unexpected: stray" in message
    assert "b is [10, 6], expected [6, 10]" in message
    assert "q is I8, expected one of BF16, F16, F32" in message


def test_ignored_tensors_are_skipped_with_one_line(
    tmp_path: Path, table: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(
        {"a": table, "mtp.0": table.clone(), "mtp.1": table.clone()}, tmp_path / "model.safetensors"
    )
    logger = logging.getLogger("tandem.models.weights")
    logger.addHandler(caplog.handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        load(tmp_path, {"a": whole("a", (10, 6), torch.float32)}, ignored=[r"^mtp\."])
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(level)
    lines = {record.getMessage() for record in caplog.records}
    assert lines == {"skipped 2 tensors that serving does not use, as mtp.0"}


def test_optional_weight_may_be_absent(tmp_path: Path, table: torch.Tensor) -> None:
    save_file({"a": table}, tmp_path / "model.safetensors")
    optional = Weight((Piece("b", (1,)),), torch.float32, is_optional=True)
    assert list(load(tmp_path, {"a": whole("a", (10, 6), torch.float32), "b": optional})) == ["a"]


def test_missing_shards_are_named(tmp_path: Path, table: torch.Tensor) -> None:
    write(tmp_path, {f"model-{i}.safetensors": {f"t{i}": table} for i in range(3)})
    (tmp_path / "model-0.safetensors").unlink()
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 2 of 3.*model-0\.safetensors, model-2\.safe"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 20, 100])
def test_truncated_file_is_named(tmp_path: Path, table: torch.Tensor, kept: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": table}, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(
        ModelError, match=rf"model\.safetensors is not a complete.*{kept} bytes.*download"
    ):
        Checkpoint(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors\.index\.json nor model"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"metadata": {}}', '{"weight_map": 3}', '{"weight_map": {"a": 5, "b": "x"}}'],
)
def test_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        Checkpoint(tmp_path)


def test_prefix_is_the_one_in_use(tmp_path: Path, table: torch.Tensor) -> None:
    save_file({"model.a": table}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.prefix(["backbone.", "model."]) == "model."
    assert checkpoint.prefix(["x.", "y."]) == "x."


def test_tensors_in_two_files_are_named(tmp_path: Path, table: torch.Tensor) -> None:
    """Which of them is meant nobody can tell: a stale file beside a new one must not be served."""
    save_file({"a": table, "b": table + 2}, tmp_path / "model-1.safetensors")
    save_file({"b": table + 1}, tmp_path / "model-2.safetensors")
    with pytest.raises(ModelError, match=r"1 tensors lie in two files: b in model-1\.safetensors"):
        Checkpoint(tmp_path)


def test_an_index_beside_a_file_that_it_does_not_name_is_refused(
    tmp_path: Path, table: torch.Tensor
) -> None:
    save_file({"a": table}, tmp_path / "model.safetensors")
    save_file({"a": table + 1}, tmp_path / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="which does not name it; remove the one that is stale"):
        Checkpoint(tmp_path)
