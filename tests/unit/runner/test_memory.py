"""Views of the arena lie where the StateSpec says, and nowhere else."""

import pytest
import torch

from tandem.config.model import ModelConfig
from tandem.errors import CapacityError
from tandem.runner.memory import Arena, build_arena, torch_dtype
from tandem.state.arena import ArenaGeometry, build_geometry
from tandem.state.spec import PlacedComponent, StateSpec, build_state_spec
from tandem.units import dtype_nbytes
from tests.unit.state.layouts import attention, mamba2, model

CPU = torch.device("cpu")
# Several layers, two attention layers, groups that are replicated at tp 4, odd head sizes.
HYBRID = model(
    (mamba2(8, 2),),
    (attention(2, 8),),
    (mamba2(8, 2, head_dim=3, state_size=5),),
    (attention(4, 4),),
)
MODELS = {
    "hybrid": HYBRID,
    "hybrid fp32": model((mamba2(4, 1),), (attention(2, 8),), dtype="float32"),
    "state in bf16": model((mamba2(4, 2),), (attention(2, 8),), state_dtype="bfloat16"),
    "attention": model((attention(2, 8),), (attention(2, 8),)),
    "recurrent": model((mamba2(4, 2),), (mamba2(4, 2),)),
    "slot below page": model((attention(8, 64),), (mamba2(2, 1),)),
}
CASES = [(name, 1, 0) for name in MODELS] + [("hybrid", 2, 1), ("hybrid", 4, 3)]


def build(config: ModelConfig, tp: int, rank: int, num_slabs: int = 3) -> Arena:
    spec = build_state_spec(config, tp=tp, rank=rank, page_tokens=8)
    geometry = build_geometry(
        page_tokens=8,
        page_nbytes=spec.page_nbytes,
        slot_nbytes=spec.slot_nbytes,
        num_slabs=num_slabs,
    )
    return build_arena(spec, geometry, CPU)


def parts(spec: StateSpec, geometry: ArenaGeometry) -> list[tuple[str, PlacedComponent, int, int]]:
    """(part, component, how many blocks, bytes from one block to the next)."""
    pages = [("page", it, geometry.num_pages, geometry.page_nbytes) for it in spec.page]
    return pages + [("slot", it, geometry.num_slots, geometry.slot_stride) for it in spec.slot]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}, rank {case[2]} of {case[1]}")
def arena(request: pytest.FixtureRequest) -> Arena:
    name, tp, rank = request.param
    return build(MODELS[name], tp, rank)


def test_every_component_has_a_view_of_its_shape_dtype_and_strides(arena: Arena) -> None:
    found = 0
    for part, placed, count, stride in parts(arena.spec, arena.geometry):
        view = arena.views[placed.layer][placed.name]
        found += 1
        units = len(placed.units)
        shape = (
            (units, placed.unit_shape[0], 8, placed.unit_shape[1])
            if part == "page"
            else (units, *placed.unit_shape)
        )
        assert view.shape == (count, *shape)
        assert view.dtype == torch_dtype(placed.dtype)
        itemsize = dtype_nbytes(placed.dtype)
        assert view.stride(0) * itemsize == stride
        assert view.data_ptr() == arena.buffer.data_ptr() + placed.offset
        assert view[0].is_contiguous()
        assert view[0].numel() * itemsize == placed.nbytes
    assert found == sum(len(views) for views in arena.views.values())


def test_a_write_through_a_view_changes_its_own_bytes_alone(arena: Arena) -> None:
    for part, placed, count, stride in parts(arena.spec, arena.geometry):
        view = arena.views[placed.layer][placed.name]
        for index in {0, count // 2, count - 1}:
            arena.buffer.fill_(0xFF)  # NaN in every float type
            assert bool(view.isnan().all())
            view[index] = 0
            start = index * stride + placed.offset
            stop = start + placed.nbytes
            assert not arena.buffer[start:stop].any(), (part, placed, index)
            assert bool((arena.buffer[:start] == 0xFF).all()), (part, placed, index)
            assert bool((arena.buffer[stop:] == 0xFF).all()), (part, placed, index)


def test_units_are_outermost(arena: Arena) -> None:
    """What tensor parallelism cuts is one byte interval."""
    for _, placed, _, stride in parts(arena.spec, arena.geometry):
        view = arena.views[placed.layer][placed.name]
        arena.buffer.zero_()
        view[1, -1] = float("nan")
        where = arena.buffer.nonzero().flatten()
        start = stride + placed.offset + placed.nbytes - placed.unit_nbytes
        assert start <= int(where.min())
        assert int(where.max()) < start + placed.unit_nbytes


def test_pages_and_slots_are_two_views_of_the_same_bytes() -> None:
    arena = build(HYBRID, 1, 0)
    geometry = arena.geometry
    arena.buffer.zero_()
    arena.views[0]["ssm"][1] = 1.0  # slot 1 is slab 1
    touched = arena.views[1]["kv"].flatten(1).any(dim=1).nonzero().flatten().tolist()
    touched += arena.views[3]["kv"].flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert touched
    per_slab = geometry.pages_per_slab
    assert set(touched) <= set(range(per_slab, 2 * per_slab))


def test_the_buffer_starts_on_a_page_of_the_operating_system(arena: Arena) -> None:
    assert arena.buffer.data_ptr() % 4096 == 0
    assert arena.buffer.dtype == torch.uint8
    assert arena.buffer.shape == (arena.geometry.arena_nbytes,)


def test_kinds_that_a_model_lacks_have_no_views() -> None:
    views = build(MODELS["attention"], 1, 0).views
    assert {tuple(components) for components in views.values()} == {("kv",)}
    views = build(MODELS["recurrent"], 1, 0).views
    assert {tuple(components) for components in views.values()} == {
        ("conv.x", "conv.B", "conv.C", "ssm")
    }


def test_an_arena_beyond_all_memory_is_refused_with_the_way_out() -> None:
    with pytest.raises(CapacityError, match=r"TiB cannot be allocated on cpu: .*lower arena_mib"):
        build(HYBRID, 1, 0, num_slabs=1 << 40)
