import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import TransferError
from tandem.transfer.descriptors import DescriptorTable, Row, as_int32
from tests.unit.transfer.memory import build_rank, hybrid


def table(page_rows, slot_rows, num_slabs=3):
    layout = build_rank(hybrid(), 1, 0, 8, num_slabs).layout
    return DescriptorTable(
        layout,
        tuple(Row(8 * index, 8) for index in range(page_rows)),
        tuple(Row(16 * index, 4 + index) for index in range(slot_rows)),
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 4))
def test_ids_never_overlap_and_name_the_rows_in_order(page_rows, slot_rows, num_slabs):
    found = table(page_rows, slot_rows, num_slabs)
    geometry = found.layout.geometry
    pages = np.arange(geometry.num_pages, dtype=np.int64)
    ids = [found.page_ids(row, pages) for row in range(page_rows)]
    ids += [found.slot_ids(slot) for slot in range(geometry.num_slots)]
    flat = np.concatenate(ids) if ids else np.empty(0, dtype=np.int64)
    assert sorted(flat.tolist()) == list(range(found.num_ids))
    # The flat order of strided rows, as transfer libraries count them.
    expanded = [
        (int(address) + index * int(stride) - found.layout.base_address, int(nbytes))
        for address, nbytes, _, stride, count in found.strided_rows()
        for index in range(int(count))
    ]
    starts, lengths = found.intervals(np.arange(found.num_ids, dtype=np.int64))
    assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == expanded
    assert all(start >= 0 and start + size <= geometry.arena_nbytes for start, size in expanded)


def test_ids_follow_the_formulas():
    found = table(2, 3)
    geometry = found.layout.geometry
    pages = np.asarray([4, 1], dtype=np.int64)
    assert found.page_ids(1, pages).tolist() == [geometry.num_pages + 4, geometry.num_pages + 1]
    first = 2 * geometry.num_pages
    slots = geometry.num_slots
    assert found.slot_ids(2).tolist() == [first + 2, first + slots + 2, first + 2 * slots + 2]


def test_pages_and_slots_outside_the_arena_are_refused():
    found = table(1, 1)
    with pytest.raises(TransferError, match="page=-1"):
        found.page_ids(0, np.asarray([0, -1], dtype=np.int64))
    with pytest.raises(TransferError, match="slot=99"):
        found.slot_ids(99)


def test_a_row_outside_its_page_is_our_own_bug():
    layout = build_rank(hybrid(), 1, 0, 8, 2).layout
    for rows in (Row(-1, 4), Row(0, 0), Row(layout.geometry.page_nbytes - 3, 4)):
        with pytest.raises(AssertionError):
            DescriptorTable(layout, (rows,), ())


def test_wide_ids_do_not_wrap():
    with pytest.raises(AssertionError):
        as_int32(np.asarray([1 << 32], dtype=np.int64), table(1, 1))
