"""A state that is rounded at random meets bits that neither slot nor batch decide."""

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from tandem.layers.mamba1 import Mamba1
from tandem.layers.mamba2 import Mamba2
from tandem.state.kinds import components_of
from tests.unit.layers import test_mamba1, test_mamba2
from tests.unit.layers.building import build, context, stored_tensors
from tests.unit.layers.recurrent import batch_of, tokens

LAYERS = {"mamba1": (Mamba1, test_mamba1.CONFIG), "mamba2": (Mamba2, test_mamba2.CONFIG)}


def slots_of(config, num_slots, state_dtype):
    return MappingProxyType(
        {
            item.name: torch.full(
                (num_slots, item.units, *item.unit_shape),
                torch.nan,
                dtype=getattr(torch, item.dtype),
            )
            for item in components_of(config, "float32", state_dtype)
        }
    )


@pytest.mark.parametrize("kind", LAYERS)
def test_a_sequence_has_the_same_state_in_any_slot_and_batch(kind):
    layer_type, config = LAYERS[kind]
    stored = stored_tensors(layer_type, config)
    layer = build(layer_type, config, stored, replace(context(), rounds_at_random=True))
    alone, beside = slots_of(config, 4, "float16"), slots_of(config, 4, "float16")
    x, y = tokens(8, 1), tokens(8, 2)
    layer(x[:4], batch_of(alone, [3], [4], [False]))
    layer(torch.cat([y[:2], x[:4]]), batch_of(beside, [2, 0], [2, 4], [False, False]))
    for at in range(4, 8):
        layer(x[at : at + 1], batch_of(alone, [3], [1], [True]))
        layer(
            torch.cat([y[at : at + 1], x[at : at + 1]]),
            batch_of(beside, [2, 0], [1, 1], [True, True]),
        )
    assert torch.equal(alone["ssm"][3], beside["ssm"][0])
    exact = slots_of(config, 1, "float32")
    layer(x[:4], batch_of(exact, [0], [4], [False]))
    nearest = exact["ssm"].half()
    rounded = slots_of(config, 1, "float16")
    layer(x[:4], batch_of(rounded, [0], [4], [False]))
    assert (rounded["ssm"] != nearest).any()
    torch.testing.assert_close(rounded["ssm"], nearest, rtol=2e-3, atol=1e-6)
    plain = build(layer_type, config, stored, context())
    plain(x[:4], batch_of(rounded, [0], [4], [False]))
    assert torch.equal(rounded["ssm"], nearest)
