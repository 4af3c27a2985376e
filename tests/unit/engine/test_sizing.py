"""Sizes of an engine follow from its settings and its model, and what cannot fit is refused."""

import logging

import pytest

from tandem.config.args import build_config
from tandem.config.model import ModelConfig
from tandem.engine.sizing import Sizing, log_sizing, longest_sequence, size_engine
from tandem.errors import CapacityError, ConfigError, ShardingError
from tandem.state.arena import build_geometry
from tests.unit.state.layouts import attention, mamba2, model

MIB = 1 << 20
# One page of 16 tokens: 2 heads x 2 x 16 x 32 x 2 B = 4 KiB. One slot: 8 heads of 64 x 128 fp32
# and its windows, 270 KiB.
HYBRID = model((attention(2, 32),), (mamba2(8, 2, head_dim=64, state_size=128),), dtype="bfloat16")
ATTENTION = model((attention(2, 32),))
RECURRENT = model((mamba2(8, 2, head_dim=64, state_size=128),))


@pytest.fixture(autouse=True)
def propagate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test before this one may have configured the logger."""
    monkeypatch.setattr(logging.getLogger("tandem"), "propagate", True)


def size(config_model: ModelConfig = HYBRID, **settings: object) -> Sizing:
    return size_engine(build_config("unused", settings), config_model)


def test_the_arena_has_the_size_that_was_asked_for() -> None:
    geometry = size(arena_mib=8).geometry
    assert geometry.arena_nbytes <= 8 * MIB < geometry.arena_nbytes + geometry.slab_nbytes


def test_by_default_every_sequence_has_room_up_to_a_share_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizing = size(max_num_seqs=8)
    geometry = sizing.geometry
    pages = 8 * -(-sizing.max_model_len // 16)
    assert geometry.slabs_for(pages, 8) <= geometry.num_slabs
    assert sizing.max_model_len == HYBRID.max_position
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 1 << 13))
    small = size(max_num_seqs=64)
    assert small.geometry.arena_nbytes <= (32 * MIB) // 4
    # Ranks share a machine.
    assert size(max_num_seqs=64, tp=2).geometry.arena_nbytes <= (32 * MIB) // 4 // 2


def test_the_longest_sequence_leaves_a_slab_for_its_slot() -> None:
    geometry = build_geometry(page_tokens=16, page_nbytes=256, slot_nbytes=1024, num_slabs=5)
    assert longest_sequence(geometry) == 4 * 4 * 16
    pages_alone = build_geometry(page_tokens=16, page_nbytes=256, slot_nbytes=0, num_slabs=5)
    assert longest_sequence(pages_alone) == 5 * 16
    slots_alone = build_geometry(page_tokens=16, page_nbytes=0, slot_nbytes=1024, num_slabs=5)
    assert longest_sequence(slots_alone) is None


def test_without_a_wish_the_length_is_what_fits() -> None:
    sizing = size(arena_mib=1)
    assert sizing.geometry.num_slabs == 3
    assert sizing.max_model_len == min(HYBRID.max_position, longest_sequence(sizing.geometry) or 0)
    assert size(ATTENTION, arena_mib=1).max_model_len == ATTENTION.max_position
    assert size(RECURRENT, arena_mib=4).max_model_len == RECURRENT.max_position


def test_a_length_that_does_not_fit_is_refused() -> None:
    big = model((attention(8, 128),), (mamba2(8, 2),))
    with pytest.raises(ConfigError, match=r"max_model_len=1024 does not fit.*raise arena_mib"):
        size(big, arena_mib=2, max_model_len=1024)


def test_a_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=1025 exceeds .* limit of 1024 tokens"):
        size(arena_mib=8, max_model_len=1025)
    assert size(arena_mib=8, max_model_len=1024).max_model_len == 1024


def test_an_arena_without_room_for_one_sequence_is_refused() -> None:
    large = model((attention(2, 32),), (mamba2(64, 2, head_dim=64, state_size=128),))
    with pytest.raises(CapacityError, match="one sequence needs 2"):
        size(large, arena_mib=1)


def test_more_sequences_than_slots_are_clamped_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "tandem"):
        sizing = size(RECURRENT, arena_mib=1, max_num_seqs=64)
    assert sizing.max_num_seqs == sizing.geometry.num_slots == 3
    assert "max_num_seqs=64 exceeds the 3 slots" in caplog.text


def test_a_tp_that_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(ShardingError, match=r"kv has 2 units.*tp=3"):
        size(tp=3)


def test_the_start_up_table_names_sizes_and_sequences(caplog: pytest.LogCaptureFixture) -> None:
    sizing = size(arena_mib=8, max_num_seqs=4)
    with caplog.at_level(logging.INFO, "tandem"):
        log_sizing(sizing)
    geometry = sizing.geometry
    assert f"{geometry.num_slabs} slabs" in caplog.text
    assert f"{geometry.pages_per_slab} pages (16 tokens" in caplog.text
    assert "padding" in caplog.text
    assert "4 sequences of 1024 tokens run at once (max_num_seqs)" in caplog.text
