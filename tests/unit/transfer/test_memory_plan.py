import json

import pytest

from tandem.errors import ConfigError, ShardingError
from tandem.transfer.memory_plan import build_plan, render_plan
from tests.unit.state.layouts import attention, mamba2, model

MAMBA = mamba2(64, 8, head_dim=64, state_size=128)
NANO = model(*[(MAMBA,)] * 23, *[(attention(2, 128),)] * 6)


@pytest.mark.parametrize(
    ("tp", "page", "slot", "pages_per_slab", "slab", "padding"),
    [
        (1, 393_216, 49_082_368, 125, 49_152_000, 69_632),
        (2, 196_608, 24_541_184, 125, 24_576_000, 34_816),
        (4, 196_608, 12_270_592, 63, 12_386_304, 115_712),
    ],
)
def test_sizes_of_nemotron_3_nano(tp, page, slot, pages_per_slab, slab, padding):
    plan = build_plan(NANO, tp=tp, page_tokens=64)
    assert plan["page_nbytes"] == page
    assert plan["slot_nbytes"] == slot
    assert (plan["pages_per_slab"], plan["slots_per_slab"]) == (pages_per_slab, 1)
    assert (plan["slab_nbytes"], plan["padding_nbytes"]) == (slab, padding)
    assert "segments" not in plan


def test_components_say_where_they_lie_and_whose_units_they_are():
    plan = build_plan(NANO, tp=4, rank=3, page_tokens=64)
    first = {item["name"]: item for item in plan["components"] if item["layer"] in (0, 23)}
    assert first["kv"] == {
        "part": "page",
        "layer": 23,
        "name": "kv",
        "offset": 0,
        "unit_nbytes": 2 * 64 * 128 * 2,
        "units": [1],
    }
    assert first["conv.x"]["units"] == list(range(48, 64))
    assert first["conv.B"] == {
        "part": "slot",
        "layer": 0,
        "name": "conv.B",
        "offset": 16 * 64 * 3 * 2,
        "unit_nbytes": 128 * 3 * 2,
        "units": [6, 7],
    }


def test_segments_cover_a_rank_once_before_merging():
    plan = build_plan(NANO, tp=2, rank=1, page_tokens=64, peer_tp=1)
    for part, expected in (("page", 196_608), ("slot", 24_541_184)):
        found = [item for item in plan["segments"] if item["part"] == part]
        assert sum(item["nbytes"] for item in found) == expected
        starts = [item["dst_offset"] for item in found]
        assert starts == sorted(set(starts))
        assert {item["src_rank"] for item in found} == {0}
        assert not any("src_page" in item for item in found)
    kv = next(item for item in plan["segments"] if item["component"] == "kv")
    assert (kv["src_offset"], kv["dst_offset"], kv["nbytes"]) == (32_768, 0, 32_768)


def test_unequal_page_sizes_name_pages_of_the_period():
    plan = build_plan(NANO, tp=1, page_tokens=64, peer_tp=1, peer_page_tokens=16)
    pages = [item for item in plan["segments"] if item["part"] == "page"]
    assert {item["src_page"] for item in pages} == {0, 1, 2, 3}
    assert {item["dst_page"] for item in pages} == {0}
    assert sum(item["nbytes"] for item in pages) == plan["page_nbytes"]
    assert not any("src_page" in item for item in plan["segments"] if item["part"] == "slot")


@pytest.mark.parametrize(("tp", "peer_tp"), [(3, None), (1, 3)])
def test_sizes_that_do_not_fit_are_refused_by_component_units_and_tp(tp, peer_tp):
    with pytest.raises(ShardingError, match=r"conv\.x has 64 units.*tp=3"):
        build_plan(NANO, tp=tp, page_tokens=64, peer_tp=peer_tp)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"tp": 0}, ConfigError, "tp=0"),
        ({"tp": 1, "peer_tp": 0}, ConfigError, "tp=0"),
        ({"tp": 2, "rank": 2}, ShardingError, "rank=2"),
        ({"tp": 1, "page_tokens": 12}, ConfigError, "page_tokens=12"),
        ({"tp": 1, "peer_tp": 1, "peer_page_tokens": 0}, ConfigError, "page_tokens=0"),
    ],
)
def test_bad_values_are_refused(values, error, message):
    with pytest.raises(error, match=message):
        build_plan(NANO, **values)


def test_the_plan_is_plain_json():
    plan = build_plan(NANO, tp=2, page_tokens=64, peer_tp=4, peer_page_tokens=16)
    assert json.loads(json.dumps(plan)) == plan


def test_the_table_names_sizes_components_and_sources():
    text = render_plan(build_plan(NANO, tp=1, page_tokens=64, peer_tp=2, peer_page_tokens=16))
    lines = [line.split() for line in text.splitlines()]
    assert ["slot_nbytes", "49,082,368", "46.8", "MiB"] in lines
    assert ["slot", "ssm", "23", "0-22", "0-63", "32,768", "2,097,152"] in lines
    assert ["slot", "conv.B", "1", "92", "768", "70,656"] in lines
    assert "for every 4 of its pages (1 of ours)" in text
    assert max(map(len, text.splitlines())) < 120
