from dataclasses import replace

import pytest

from tandem.config.engine import EngineConfig, ModelOptions, SchedulerOptions
from tandem.runner.worker import longest_position, model_config
from tandem.state.arena import build_geometry


@pytest.mark.parametrize(
    ("state_dtype", "setting", "expected"),
    [
        ("float32", "auto", "nearest"),
        ("bfloat16", "auto", "nearest"),
        ("float16", "auto", "stochastic"),
        ("float16", "nearest", "nearest"),
        ("bfloat16", "stochastic", "stochastic"),
    ],
)
def test_a_state_in_fp16_is_rounded_at_random_unless_told_otherwise(state_dtype, setting, expected):
    options = ModelOptions(state_dtype=state_dtype, state_rounding=setting)
    model = model_config(EngineConfig(model="tandem/demo_model", model_options=options))
    assert (model.state_dtype, model.state_rounding) == (state_dtype, expected)


@pytest.mark.parametrize(
    ("max_position", "max_model_len", "num_pages", "expected"),
    [
        (10_000_000, None, 4, 64),  # pages of 16 tokens
        (10_000_000, 50, 4, 50),
        (40, None, 4, 40),
        (10_000_000, 512, 0, 512),  # no attention, no pages
    ],
)
def test_positions_end_where_no_sequence_can_reach(
    max_position, max_model_len, num_pages, expected
):
    config = EngineConfig(
        model="tandem/demo_model", scheduler=SchedulerOptions(max_model_len=max_model_len)
    )
    model = replace(model_config(config), max_position=max_position)
    geometry = build_geometry(
        page_tokens=16, page_nbytes=256 if num_pages else 0, slot_nbytes=256, num_slabs=num_pages
    )
    assert longest_position(config, model, geometry) == expected
