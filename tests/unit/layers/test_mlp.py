import pytest
import torch
import torch.nn.functional as F

from tandem.config.model import MlpConfig
from tandem.layers.mlp import Mlp
from tests.stepper import ThreadGroup
from tests.unit.layers.building import HIDDEN, build, context, stored_tensors

X = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("activation", ["relu2", "silu_gated"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_hold_one_mlp(activation: str, has_bias: bool, tp: int) -> None:
    config = MlpConfig(24, activation, has_bias)
    stored = stored_tensors(Mlp, config)

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, stored[f"{name}.weight"], stored.get(f"{name}.bias"))

    up = project("up_proj", X)
    inner = up.relu() ** 2 if activation == "relu2" else F.silu(project("gate_proj", X)) * up
    expected = project("down_proj", inner)
    for out in ThreadGroup(tp).run(lambda rank: build(Mlp, config, stored, context(rank))(X, None)):
        torch.testing.assert_close(out, expected)
