"""A kind of state is declared in one place: a moving average, made up here in some forty lines,
gets memory, chunked prefill, batches, ranks, engines and transfers between unequal ones."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from tandem.config.build import build_model_config
from tandem.config.keys import Keys
from tandem.config.model import LayerConfig, ModelConfig
from tandem.layers.batch import ForwardBatch
from tandem.layers.context import LayerContext
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.weight import Tensors, Weight, linear
from tandem.models.decoder import LAYERS
from tandem.models.family import Branch, Family, pre_normed
from tandem.models.registry import FAMILIES
from tandem.state.kinds import KINDS, Component
from tests.equivalence.engines import (
    assert_equal_outputs,
    build_core,
    random_prompts,
    request,
    run,
    run_apart,
)
from tests.stepper import Stepper, random_tokens

HIDDEN, UNITS, WIDTH = 32, 8, 3


@dataclass(frozen=True)
class AverageConfig:
    kind: ClassVar[str] = "average"
    units: int
    width: int


def components(mixer: AverageConfig, dtype: str, state_dtype: str) -> tuple[Component, ...]:
    return (Component("mean", mixer.units, (mixer.width,), state_dtype),)


class Average:
    """mean_t = (mean_{t-1} + x_t) / 2 of projected channels."""

    @staticmethod
    def weights(config: AverageConfig, context: LayerContext) -> dict[str, Weight]:
        first, last = context.shard(config.units, "units")
        own, size = (first * config.width, last * config.width), config.units * config.width
        return {
            **linear("in", size, context.hidden_size, False, context.dtype, rows=[own]),
            **linear("out", context.hidden_size, size, False, context.dtype, columns=own),
        }

    def __init__(self, config: AverageConfig, context: LayerContext, tensors: Tensors) -> None:
        self.layer, self.width = context.layer, config.width
        self.into, self.out = build_linear(tensors, "in"), RowLinear(tensors, "out", context.tp)

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        state = batch.state[self.layer]["mean"]
        x = self.into(hidden).unflatten(1, (-1, self.width))  # [T, units, width]
        y = torch.empty_like(x)
        starts = batch.query_start.tolist()
        for row, slot in enumerate(batch.slots.tolist()):
            mean = state[slot].clone() if batch.has_state[row] else torch.zeros_like(state[slot])
            for token in range(starts[row], starts[row + 1]):
                mean = (mean + x[token]) / 2
                y[token] = mean
            state[slot] = mean
        return self.out(y.flatten(1))


def read(keys: Keys) -> ModelConfig:
    mixer = AverageConfig(keys.integer("units"), keys.integer("width"))
    layer = LayerConfig((mixer,), None)
    return build_model_config(keys, layers=(layer,) * 2, norm_eps=1e-5)


FAMILY = Family(
    title="Toy",
    read=read,
    parts=lambda config: [
        part
        for index, layer in enumerate(config.layers)
        for part in pre_normed(index, [Branch(f"layers.{index}.average.", layer.mixers[0])], [])
    ],
    kinds=("average",),
    prefixes=("",),
    embedding="embed.weight",
    final_norm="norm.weight",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, while the kind, its layer and its family are registered: one line each."""
    tables: list[tuple[dict, Any, Any]] = [
        (KINDS, "average", components),
        (LAYERS, AverageConfig, Average),
        (FAMILIES, "toy", FAMILY),
    ]
    for table, name, value in tables:
        monkeypatch.setitem(table, name, value)
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (512, HIDDEN), "lm_head.weight": (512, HIDDEN)}
    for index in range(2):
        shapes[f"layers.{index}.average.in.weight"] = (UNITS * WIDTH, HIDDEN)
        shapes[f"layers.{index}.average.out.weight"] = (HIDDEN, UNITS * WIDTH)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    norms = ("norm.weight", "layers.0.input_layernorm.weight", "layers.1.input_layernorm.weight")
    save_file(
        {**tensors, **{name: torch.ones(HIDDEN) for name in norms}}, tmp_path / "model.safetensors"
    )
    sizes = {"vocab_size": 512, "hidden_size": HIDDEN, "units": UNITS, "width": WIDTH}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "toy", **sizes}))
    return tmp_path


def test_chunks_batches_and_ranks_equal_the_whole(folder: Path) -> None:
    tokens = random_tokens(40)
    (expected,) = Stepper(folder).step([(0, tokens)])
    for tp in (1, 2, 4):
        stepper = Stepper(folder, tp=tp)
        stepper.step([(0, random_tokens(9, seed=3)), (1, tokens[:7])])
        stepper.forget(0)
        first = stepper.step([(1, tokens[7:20]), (0, tokens[:1])])
        second = stepper.step([(0, tokens[1:2]), (1, tokens[20:])])
        torch.testing.assert_close(torch.cat([first[0], second[1]]), expected[7:])
        torch.testing.assert_close(torch.cat([first[1], second[0]]), expected[:2])


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(4, 2), (1, 8), (8, 1), (2, 4)])
def test_its_state_moves_between_unequal_engines(
    folder: Path, prefill_tp: int, decode_tp: int
) -> None:
    tokens = random_tokens(40)
    (expected,) = Stepper(folder).step([(0, tokens)])
    prefill = Stepper(folder, tp=prefill_tp)
    decode = Stepper(folder, tp=decode_tp, page_tokens=12)
    prefill.step([(2, tokens[:30])])
    decode.move_from(prefill, 2)
    (rest,) = decode.step([(2, tokens[30:])])
    torch.testing.assert_close(rest, expected[30:])


def test_engines_serve_it_together_and_apart(folder: Path) -> None:
    lengths = [1, 5, 40]
    requests = [request(f"r{i}", prompt) for i, prompt in enumerate(random_prompts(lengths))]
    cores = [build_core(folder, arena_mib=1, role=role) for role in ("prefill", "decode")]
    together = build_core(folder, arena_mib=1, budget_tokens=16)
    try:
        assert_equal_outputs(run_apart(*cores, requests), run(together, requests), lengths)
    finally:
        for core in (*reversed(cores), together):
            core.close()
