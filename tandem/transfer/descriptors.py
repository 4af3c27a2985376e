"""Numbers for every piece of an arena that a transfer may name.

A `DescriptorTable` has a row for each interval of a page or slot that moves as one piece. Pages
come first: id = row * num_pages + page; then slots: id = num_page_ids + row * num_slots + slot.
It knows one side; which ids belong together is decided in plan.py.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.errors import TransferError
from tandem.transfer.layout import RankLayout

Ids = npt.NDArray[np.int64]

# Transfer libraries take 32-bit ids, and may wrap larger ones silently.
MAX_IDS = 2**31 - 1


@dataclass(frozen=True)
class Row:
    """The interval `[offset, offset + nbytes)` of every page, or of every slot."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class DescriptorTable:
    """Rows over the arena of one rank. Raises TransferError if it would need too many ids."""

    layout: RankLayout
    page_rows: tuple[Row, ...]
    slot_rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        geometry = self.layout.geometry
        for rows, limit in (
            (self.page_rows, geometry.page_nbytes),
            (self.slot_rows, geometry.slot_stride),
        ):
            for row in rows:
                assert row.offset >= 0 < row.nbytes, row
                assert row.offset + row.nbytes <= limit, (row, limit)
        if self.num_ids > MAX_IDS:
            raise TransferError(
                f"{len(self.page_rows)} rows of {geometry.num_pages} pages and "
                f"{len(self.slot_rows)} rows of {geometry.num_slots} slots need {self.num_ids} "
                f"descriptor ids; at most {MAX_IDS} are possible: use a smaller arena, "
                "larger pages or equal tensor-parallel sizes"
            )

    @property
    def num_page_ids(self) -> int:
        return len(self.page_rows) * self.layout.geometry.num_pages

    @property
    def num_ids(self) -> int:
        return self.num_page_ids + len(self.slot_rows) * self.layout.geometry.num_slots

    def page_ids(self, row: int, pages: Ids) -> Ids:
        """Ids of one row in the given pages. Raises: TransferError for a page that is none."""
        num_pages = self.layout.geometry.num_pages
        _check_range("page", pages, num_pages)
        return row * num_pages + pages

    def slot_ids(self, slot: int) -> Ids:
        """Ids of all rows of one slot. Raises: TransferError for a slot that is none."""
        num_slots = self.layout.geometry.num_slots
        if not 0 <= slot < num_slots:
            raise TransferError(f"slot={slot} does not exist; expected 0..{num_slots - 1}")
        rows = np.arange(len(self.slot_rows), dtype=np.int64)
        return self.num_page_ids + rows * num_slots + slot

    def strided_rows(self) -> npt.NDArray[np.uint64]:
        """[rows, 5]: address, nbytes, device, stride, count; flat ids count row by row."""
        layout, geometry = self.layout, self.layout.geometry
        found = [
            (layout.base_address + row.offset, row.nbytes, layout.device_id, stride, count)
            for rows, stride, count in (
                (self.page_rows, geometry.page_nbytes, geometry.num_pages),
                (self.slot_rows, geometry.slot_stride, geometry.num_slots),
            )
            for row in rows
        ]
        return np.asarray(found, dtype=np.uint64).reshape(-1, 5)

    def intervals(self, ids: Ids) -> tuple[Ids, Ids]:
        """(byte offsets into the arena, lengths) of the pieces that the ids name."""
        geometry = self.layout.geometry
        starts = np.empty(len(ids), dtype=np.int64)
        lengths = np.empty(len(ids), dtype=np.int64)
        is_page = ids < self.num_page_ids
        for chosen, first, rows, stride, count in (
            (is_page, 0, self.page_rows, geometry.page_nbytes, geometry.num_pages),
            (~is_page, self.num_page_ids, self.slot_rows, geometry.slot_stride, geometry.num_slots),
        ):
            if not rows or not chosen.any():
                continue
            row, index = np.divmod(ids[chosen] - first, count)
            starts[chosen] = np.asarray([item.offset for item in rows])[row] + index * stride
            lengths[chosen] = np.asarray([item.nbytes for item in rows])[row]
        return starts, lengths


def as_int32(ids: Ids, table: DescriptorTable) -> npt.NDArray[np.int32]:
    """The ids in the width that transfer libraries take; asserts that each names a piece."""
    assert ids.size == 0 or (ids.min() >= 0 and ids.max() < table.num_ids), (ids, table.num_ids)
    return ids.astype(np.int32)


def _check_range(name: str, values: npt.NDArray[Any], count: int) -> None:
    if values.size and (values.min() < 0 or values.max() >= count):
        wrong = values[(values < 0) | (values >= count)][0]
        raise TransferError(f"{name}={wrong} does not exist; expected 0..{count - 1}")
