"""Every kind of layer in a whole model: a GPU computes what a CPU does, and recorded decode steps
what plain ones do. Checkpoints are random, by the names that families declare."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.engine.llm import LLM
from tandem.layers.parallel import SingleRank
from tandem.models.decoder import Decoder
from tandem.models.registry import FAMILIES, load_model_config
from tandem.models.weights import stored_shapes
from tandem.scheduler.request import SamplingParams
from tests.equivalence.families.cases import CASES
from tests.stepper import Stepper, random_tokens

pytestmark = pytest.mark.gpu

# One of each mixer, feed-forward and way of joining them.
NAMES = [
    "bailing_hybrid",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2_moe",
    "minimax",
    "nemotron_h_latent",
    "olmo_hybrid",
    "plamo2",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_next",
    "recurrent_gemma",
    "zamba",
    "zamba2_adapters",
]
CUDA = torch.device("cuda")


def write_random(name: str, folder: Path) -> Path:
    """A checkpoint of a case's configuration; it needs no transformers."""
    (model_type,) = sorted((t for t in FAMILIES if name.startswith(t)), key=len)[-1:]
    settings = {**CASES[name].arguments, "model_type": model_type, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(settings))
    config = load_model_config(folder)
    family = FAMILIES[config.family]
    weights = Decoder.weights(config, family, SingleRank(), family.prefixes[0])
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for key, shape in stored_shapes(weights.values()).items():
        tensor = torch.randn(shape, generator=generator)
        if key.endswith(("A_log", "dt_bias", "dt_proj.bias", "dt_proj_bias", "recurrent_param")):
            tensor.uniform_(-2.0, 0.5, generator=generator)
        elif len(shape) > 1:
            tensor.mul_(0.1)  # more lets rounding grow where nothing norms a sum
        else:
            tensor.mul_(0.1).add_(1.0 if "norm" in key and not config.norm_offset else 0.0)
        tensors[key] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


def feed(stepper: Stepper, sequence: int, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    logits, start = [], 0
    for size in sizes:
        logits += stepper.step([(sequence, tokens[start : start + size])])
        start += size
    return torch.cat(logits)


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_computes_what_a_cpu_does(name: str, tmp_path: Path) -> None:
    folder, tokens = write_random(name, tmp_path), random_tokens(46)
    expected = feed(Stepper(folder), 0, tokens, [46])
    stepper = Stepper(folder, device=CUDA)
    scale = expected.abs().max()
    for sequence, sizes in enumerate([[46], [1] * 46, [3, 13, 1, 29], [40, *[1] * 6]]):
        logits = feed(stepper, sequence, tokens, sizes)
        assert float((logits - expected).abs().max() / scale) < 1e-3, sizes
    half = feed(Stepper(folder, device=CUDA, dtype="bfloat16"), 0, tokens, [40, *[1] * 6])
    assert not half.isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_recorded_decode_says_what_plain_decode_says(name: str, tmp_path: Path) -> None:
    folder = write_random(name, tmp_path)
    prompts = [random_tokens(count, seed=count) for count in (1, 40, 7, 90, 16)]
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * len(prompts)
    settings = {"max_num_seqs": 4, "budget_tokens": 64, "arena_mib": 16, "max_model_len": 256}
    found = []
    for graphs in ("auto", "off"):
        with LLM(str(folder), page_tokens=16, decode_graphs=graphs, **settings) as llm:
            outputs = llm.generate(prompts, params)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]
