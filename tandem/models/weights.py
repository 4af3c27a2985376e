"""Reads this rank's part of a safetensors checkpoint, tensor by tensor.

It knows files and declared weights, no layers. Everything is checked before the first byte is read,
and every tensor that does not fit is named at once.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import SafetensorError, safe_open

from tandem.errors import ModelError
from tandem.layers.weight import Piece, Weight
from tandem.log import get_logger

log = get_logger(__name__)

_INDEX = "model.safetensors.index.json"
# Bytes read through one mapping of a file. Pages of a mapping count as memory of the process until
# it is closed.
_MAPPED_NBYTES = 512 << 20
_BLOCK_NBYTES = 64 << 20
_NUM_LISTED = 100
_DTYPES = ("BF16", "F16", "F32")
_REDOWNLOAD = "download the checkpoint again"


@dataclass(frozen=True)
class _Stored:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it


class Checkpoint:
    """The safetensors files of an HF folder and the tensors in them.

    Raises: ModelError naming the file when a shard is missing, damaged or truncated, or the tensors
        that lie in two of them.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path)
        self._stored: dict[str, _Stored] = {}
        twice: list[str] = []
        for file in weight_files(self.folder):
            with _open(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - not a mapping
                    if name in self._stored:
                        twice.append(f"{name} in {self._stored[name].file.name} and {file.name}")
                    stored = handle.get_slice(name)
                    shape = tuple(stored.get_shape())
                    self._stored[name] = _Stored(file, shape, stored.get_dtype())
        if twice:
            raise ModelError(
                f"{self.folder}: {len(twice)} tensors lie in two files: {_listed(twice)}; "
                "remove the files that are stale"
            )

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def dtype(self, name: str) -> str:
        return self._stored[name].dtype

    def file(self, name: str) -> Path:
        return self._stored[name].file

    def prefix(self, prefixes: Sequence[str]) -> str:
        """The first of `prefixes` that a name begins with, else the first."""
        used = (prefix for prefix in prefixes if any(n.startswith(prefix) for n in self._stored))
        return next(used, prefixes[0])


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of an HF folder. Raises: ModelError naming those that are missing."""
    index = folder / _INDEX
    if index.exists():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
            names = sorted(named, key=os.fspath)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelError(f"{index} is not readable JSON: {error}; {_REDOWNLOAD}") from error
        except (KeyError, TypeError, AttributeError):
            raise ModelError(
                f"{index} has no weight_map of names to files; {_REDOWNLOAD}"
            ) from None
        if "model.safetensors" not in names and (folder / "model.safetensors").exists():
            # Other loaders take the single file; one of the two is of another checkpoint.
            raise ModelError(
                f"{folder} has model.safetensors and {_INDEX}, which does not name it; "
                "remove the one that is stale"
            )
        files = [folder / name for name in names]
    else:
        # The second name is that of models with a params.json.
        files = sorted(folder.glob("model*.safetensors")) or sorted(
            folder.glob("consolidated*.safetensors")
        )
        if not files:
            raise ModelError(
                f"{folder} has neither {_INDEX} nor model*.safetensors; "
                "expected the weights of a local HF model folder in safetensors format"
            )
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(files)} shards that {_INDEX} names: "
            f"{', '.join(missing)}; put the missing files there or {_REDOWNLOAD}"
        )
    return files


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{file} is not a complete safetensors file ({error}); it has {file.stat().st_size} "
            f"bytes: {_REDOWNLOAD}"
        ) from error


def load_weights(
    checkpoint: Checkpoint,
    weights: Mapping[str, Weight],
    device: torch.device,
    *,
    ignored: Sequence[str] = (),
    show_progress: bool = True,
) -> dict[str, torch.Tensor]:
    """Read the declared part of each tensor, converted to the declared dtype.

    Host memory stays within the loaded weights plus one mapped stretch of a file.

    Raises: ModelError that lists all tensors that are missing, unexpected or of another shape.
    """
    wanted = {
        key: weight
        for key, weight in weights.items()
        if not weight.is_optional or all(piece.name in checkpoint for piece in weight.pieces)
    }
    _check(checkpoint, wanted, ignored)
    reads: dict[Path, list[tuple[Piece, torch.Tensor, float]]] = {}
    tensors = {}
    for key, weight in wanted.items():
        tensors[key] = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        for piece, target in _targets(weight, tensors[key]):
            reads.setdefault(checkpoint.file(piece.name), []).append((piece, target, weight.offset))
    total = sum(target.nbytes for found in reads.values() for _, target, _ in found)
    with _progress(show_progress) as progress:
        task = progress.add_task("loading weights", total=total)
        for file, found in reads.items():
            with closing(_Reader(file)) as reader:
                for piece, target, offset in found:
                    reader.read(piece, target, offset)
                    progress.advance(task, target.nbytes)
    return tensors


def _check(checkpoint: Checkpoint, weights: Mapping[str, Weight], ignored: Sequence[str]) -> None:
    expected = stored_shapes(weights.values())
    missing = [name for name in expected if name not in checkpoint]
    misshapen = [
        f"{name} is {list(checkpoint.shape(name))}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in checkpoint and checkpoint.shape(name) != shape
    ]
    # Quantised values mean nothing without their scales: a cast would load noise.
    mistyped = [
        f"{name} is {checkpoint.dtype(name)}, expected one of {', '.join(_DTYPES)}"
        for name in expected
        if name in checkpoint and checkpoint.dtype(name) not in _DTYPES
    ]
    others = [name for name in checkpoint.names() if name not in expected]
    skipped = [name for name in others if any(re.search(item, name) for item in ignored)]
    unexpected = sorted(set(others) - set(skipped))
    if skipped:
        log.info("skipped %d tensors that serving does not use, as %s", len(skipped), skipped[0])
    problems = [
        f"{len(found)} {kind}: {_listed(found)}"
        for kind, found in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", misshapen),
            ("of another dtype", mistyped),
        )
        if found
    ]
    if problems:
        raise ModelError(
            f"{checkpoint.folder}: the tensors do not fit config.json; " + "; ".join(problems)
        )


def stored_shapes(weights: Iterable[Weight]) -> dict[str, tuple[int, ...]]:
    """The shape that each tensor of the checkpoint must have."""
    shapes: dict[str, tuple[int, ...]] = {}
    num_entries: dict[str, int] = {}
    for weight in weights:
        for piece in weight.pieces:
            shapes[piece.name] = piece.shape
            if piece.entry is not None:
                num_entries[piece.name] = max(num_entries.get(piece.name, 0), piece.entry + 1)
    return shapes | {name: (count, *shapes[name]) for name, count in num_entries.items()}


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _NUM_LISTED} more" if len(names) > _NUM_LISTED else ""
    return ", ".join(names[:_NUM_LISTED]) + more


def _targets(weight: Weight, tensor: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Each piece with the place it fills; rows behind the last piece are zeroed."""
    if weight.is_stacked:
        each = weight.pieces_each
        for index, entry in enumerate(tensor):
            yield from _joined(weight.pieces[index * each : (index + 1) * each], entry)
        return
    yield from _joined(weight.pieces, tensor)


def _joined(pieces: Sequence[Piece], tensor: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    row = 0
    for piece in pieces:
        num_rows = piece.taken_shape[0]
        yield piece, tensor.narrow(0, row, num_rows)
        row += num_rows
    tensor[row:].zero_()


class _Reader:
    """Copies pieces out of one file, and maps it anew before much of it counts as our memory."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._handle: Any = None
        self._mapped_nbytes = 0

    def read(self, piece: Piece, target: torch.Tensor, offset: float = 0.0) -> None:
        """Fill `target` with the piece, `offset` added; sums and factors in fp32."""
        start = 0
        for index, (first, last) in enumerate(piece.taken):
            part = target.narrow(piece.axis, start, last - first)
            scale = 1.0 if piece.scales is None else piece.scales[index]
            self._read_range(piece, first, last, part, scale, offset)
            start += last - first

    def _read_range(
        self, piece: Piece, first: int, last: int, target: torch.Tensor, scale: float, offset: float
    ) -> None:
        if piece.axis == 0 and first == last:
            return
        # Blocks of rows of the file: a column cut touches every row of them.
        begin, end = (first, last) if piece.axis == 0 else (0, piece.shape[0])
        row_nbytes = 4 * max(1, torch.Size(piece.shape[1:]).numel())
        step = max(1, _BLOCK_NBYTES // row_nbytes)
        for row in range(begin, end, step):
            stop = min(row + step, end)
            stored = self._slice(piece.name, (stop - row) * row_nbytes)
            where: tuple[slice, ...] = (slice(row, stop),)
            if piece.axis:
                where += (slice(None),) * (piece.axis - 1) + (slice(first, last),)
            block = stored[where] if piece.entry is None else stored[(piece.entry, *where)]
            if scale != 1.0 or offset:
                block = block.float() * scale + offset
            target[row - begin : stop - begin].copy_(block)

    def _slice(self, name: str, nbytes: int) -> Any:
        if self._handle is None or self._mapped_nbytes + nbytes > _MAPPED_NBYTES:
            self.close()
            self._handle = _open(self._file)
            self._handle.__enter__()
        self._mapped_nbytes += nbytes
        return self._handle.get_slice(name)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.__exit__(None, None, None)
        self._handle, self._mapped_nbytes = None, 0


def _progress(is_shown: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not is_shown or not console.is_terminal,
    )
