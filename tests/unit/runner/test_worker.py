import pytest

from tandem.config.engine import EngineConfig, ModelOptions
from tandem.runner.worker import model_config


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
