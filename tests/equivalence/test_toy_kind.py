"""A kind of state that the package has never heard of, declared here alone: memory, chunked prefill
and moves between engines of unequal sizes come with the declaration.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

from tandem.config.build import build_model_config
from tandem.config.model import LayerConfig
from tandem.layers.linear import RowLinear, build_linear
from tandem.layers.weight import linear
from tandem.models import decoder, registry
from tandem.models.family import Branch, Family, Part
from tandem.state import kinds
from tandem.state.kinds import Component
from tests.equivalence.engines import build_core, greedy, request, run, run_apart
from tests.stepper import Stepper, random_tokens
from tests.tolerances import assert_close

HIDDEN, CHANNELS, LAYERS, VOCAB = 16, 24, 2, 512
PROMPT = random_tokens(21, seed=3)

# --- the kind ---


@dataclass(frozen=True)
class AverageConfig:
    kind: ClassVar[str] = "average"
    num_channels: int
    decay: float


def average_state(mixer, dtype, state_dtype):
    return (Component("mean", mixer.num_channels, (1,), state_dtype),)


class Average:
    """y = mean of the past, of which each token replaces a share; one projection in, one out."""

    @staticmethod
    def weights(config, context):
        channels = context.shard(config.num_channels, "channels")
        sizes = (config.num_channels, context.hidden_size)
        return {
            **linear("up", *sizes, False, context.dtype, rows=[channels]),
            **linear("down", *reversed(sizes), False, context.dtype, columns=channels),
        }

    def __init__(self, config, context, tensors):
        self.layer, self.decay = context.layer, config.decay
        self.up = build_linear(tensors, "up")
        self.down = RowLinear(tensors, "down", context.tp)

    def __call__(self, hidden, batch):
        x, out, state = self.up(hidden), [], batch.state[self.layer]["mean"]
        edges = batch.query_start.tolist()
        for row, slot in enumerate(batch.slots.tolist()):
            mean = torch.zeros_like(x[0])
            if batch.has_state[row]:
                mean = state[slot, :, 0]
            for token in x[edges[row] : edges[row + 1]]:
                mean = self.decay * mean + (1 - self.decay) * token
                out.append(mean)
            state[slot, :, 0] = mean
        return self.down(torch.stack(out))


def read(keys):
    mixer = AverageConfig(keys.integer("num_channels"), 0.75)
    layers = tuple(LayerConfig((mixer,), None) for _ in range(keys.integer("num_hidden_layers")))
    return build_model_config(keys, layers=layers, norm_eps=1e-5)


def parts(config):
    return [
        Part(index, (Branch(f"layers.{index}.", layer.mixers[0]),), f"layers.{index}.norm.weight")
        for index, layer in enumerate(config.layers)
    ]


TOY = Family("Toy", read, parts, ("model.",), "embed.weight", "norm.weight")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(kinds.KINDS, AverageConfig.kind, average_state)
    monkeypatch.setitem(decoder.LAYERS, AverageConfig, Average)
    monkeypatch.setitem(registry.FAMILIES, "toy", TOY)
    # --- what its users bring ---
    config = {"model_type": "toy", "vocab_size": VOCAB, "hidden_size": HIDDEN}
    config |= {"num_hidden_layers": LAYERS, "num_channels": CHANNELS, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    tensors = {"model.embed.weight": draw(VOCAB, HIDDEN), "lm_head.weight": draw(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    for index in range(LAYERS):
        tensors[f"model.layers.{index}.norm.weight"] = torch.ones(HIDDEN)
        tensors[f"model.layers.{index}.up.weight"] = draw(CHANNELS, HIDDEN)
        tensors[f"model.layers.{index}.down.weight"] = draw(HIDDEN, CHANNELS)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def expected(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Logits [T, vocab] in float64, without anything of the package."""
    from safetensors.torch import load_file

    given = {name: item.double() for name, item in load_file(folder / "model.safetensors").items()}

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    x = given["model.embed.weight"][tokens]
    for index in range(LAYERS):
        inner = normed(x) @ given[f"model.layers.{index}.up.weight"].T
        mean, means = torch.zeros(CHANNELS, dtype=torch.float64), []
        for token in inner:
            mean = 0.75 * mean + 0.25 * token
            means.append(mean)
        x = x + torch.stack(means) @ given[f"model.layers.{index}.down.weight"].T
    return normed(x) @ given["lm_head.weight"].T


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("chunks", [[21], [1, 20], [7, 1, 13]])
def test_any_chunks_at_any_size_give_the_same(toy: Path, tp: int, chunks: list[int]) -> None:
    stepper = Stepper(toy, tp=tp)
    found, start = [], 0
    for size in chunks:
        found += stepper.step([(2, PROMPT[start : start + size])])
        start += size
    assert_close(torch.cat(found), expected(toy, PROMPT))


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(4, 2), (2, 4), (1, 2)])
def test_its_state_moves_between_engines_of_unequal_sizes(
    toy: Path, prefill_tp: int, decode_tp: int
) -> None:
    prefill = Stepper(toy, tp=prefill_tp, page_tokens=8)
    decode = Stepper(toy, tp=decode_tp, page_tokens=16)
    prefill.step([(1, PROMPT[:-1])])
    decode.read_from(prefill, 1, sequence=3)
    found = decode.step([(3, PROMPT[-1:])])[0]
    assert_close(found, expected(toy, PROMPT)[-1:])


def test_engines_serve_it_without_pages_together_and_apart(toy: Path) -> None:
    alone = build_core(toy)
    prefill, decode = build_core(toy, role="prefill"), build_core(toy, role="decode")
    try:
        requests = [request("a", PROMPT, greedy(5)), request("b", PROMPT[:9], greedy(3))]
        answers = run(alone, requests)
        for item, answer in zip(requests, answers, strict=True):
            tokens = list(item.prompt_token_ids)
            for token in answer.token_ids:
                assert token == int(expected(toy, tokens)[-1].argmax())
                tokens.append(token)
            assert len(tokens) == len(item.prompt_token_ids) + item.sampling.max_tokens
        apart = run_apart(prefill, decode, requests)
        assert [item.token_ids for item in apart] == [item.token_ids for item in answers]
        geometry = alone._cache.geometry
        assert geometry.num_pages == 0 < geometry.num_slots
    finally:
        for core in (decode, prefill, alone):
            core.close()
