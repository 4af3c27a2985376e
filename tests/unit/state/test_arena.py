import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import CapacityError
from tandem.state.arena import build_geometry, geometry_for_memory
from tandem.state.spec import build_state_spec
from tests.unit.state.layouts import attention, mamba2, model

MIB = 1 << 20


def nano() -> object:
    """Nemotron-3-Nano-30B-A3B: 23 Mamba-2 layers, 6 attention layers; its MoE layers keep
    nothing."""
    mamba = mamba2(64, 8, head_dim=64, state_size=128, conv_kernel=4)
    return model(*[(mamba,)] * 23, *[(attention(2, 128),)] * 6)


@pytest.mark.parametrize(
    ("tp", "page", "slot", "layer", "pages_per_slab", "slab", "padding"),
    [
        (1, 393_216, 49_082_368, (24_576, 6_144, 6_144, 2_097_152), 125, 49_152_000, 69_632),
        (2, 196_608, 24_541_184, (12_288, 3_072, 3_072, 1_048_576), 125, 24_576_000, 34_816),
        (4, 196_608, 12_270_592, (6_144, 1_536, 1_536, 524_288), 63, 12_386_304, 115_712),
    ],
)
def test_nemotron_3_nano(tp, page, slot, layer, pages_per_slab, slab, padding):
    for rank in range(tp):
        spec = build_state_spec(nano(), tp=tp, rank=rank, page_tokens=64)
        assert (spec.page_nbytes, spec.slot_nbytes) == (page, slot)
        assert tuple(item.nbytes for item in spec.slot if item.layer == 0) == layer
    geometry = build_geometry(page_tokens=64, page_nbytes=page, slot_nbytes=slot, num_slabs=3)
    assert (geometry.pages_per_slab, geometry.slots_per_slab) == (pages_per_slab, 1)
    assert (geometry.slab_nbytes, geometry.padding_nbytes) == (slab, padding)
    assert (geometry.num_pages, geometry.num_slots) == (3 * pages_per_slab, 3)
    assert geometry.arena_nbytes == 3 * slab


@given(st.integers(0, 600), st.integers(0, 600), st.integers(1, 6))
def test_slabs_hold_whole_pages_and_whole_slots(page_units, slot_units, num_slabs):
    page, slot = page_units * 128, slot_units * 256
    if page == slot == 0:
        with pytest.raises(CapacityError, match="nothing to serve"):
            build_geometry(page_tokens=16, page_nbytes=page, slot_nbytes=slot, num_slabs=1)
        return
    geometry = build_geometry(
        page_tokens=16, page_nbytes=page, slot_nbytes=slot, num_slabs=num_slabs
    )
    slab = geometry.slab_nbytes
    if page:
        assert geometry.pages_per_slab * page == slab
        assert geometry.num_pages * page == geometry.arena_nbytes
    else:
        assert geometry.num_pages == 0
    if slot:
        assert geometry.slots_per_slab * geometry.slot_stride == slab
        assert geometry.slot_stride >= slot
        assert geometry.padding_nbytes == slab - geometry.slots_per_slab * slot >= 0
        # Page p and slot s are in slab k under both views.
        assert geometry.num_slots * geometry.slot_stride == geometry.arena_nbytes
    else:
        assert geometry.num_slots == 0
    if page and slot >= page:
        assert geometry.slots_per_slab == 1
        assert slab - slot < page
    elif page and slot:
        assert geometry.pages_per_slab == 1
        best = [
            count
            for count in range(1, page // slot + 1)
            if count == 1 or (page % count == 0 and page // count % 256 == 0)
        ]
        assert geometry.slots_per_slab == max(best)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9), st.integers(1, 9))
def test_slabs_for_counts_each_kind_packed(num_pages, num_slots, page_units, slot_units):
    geometry = build_geometry(
        page_tokens=16, page_nbytes=page_units * 256, slot_nbytes=slot_units * 256, num_slabs=1
    )
    slabs = geometry.slabs_for(num_pages, num_slots)
    pages_in = slots_in = used = 0
    while pages_in < num_pages:
        pages_in, used = pages_in + geometry.pages_per_slab, used + 1
    while slots_in < num_slots:
        slots_in, used = slots_in + geometry.slots_per_slab, used + 1
    assert slabs == used


def test_geometry_for_memory_fills_it_with_whole_slabs():
    geometry = geometry_for_memory(
        page_tokens=64, page_nbytes=393_216, slot_nbytes=49_082_368, memory_nbytes=1024 * MIB
    )
    assert geometry.num_slabs == 1024 * MIB // 49_152_000 == 21


def test_geometry_for_memory_names_what_is_needed():
    with pytest.raises(CapacityError, match=r"holds 1 slabs of 46\.9 MiB.*needs 2"):
        geometry_for_memory(
            page_tokens=64, page_nbytes=393_216, slot_nbytes=49_082_368, memory_nbytes=64 * MIB
        )
