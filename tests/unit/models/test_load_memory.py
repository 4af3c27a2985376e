"""What loading a checkpoint takes of the host's memory beyond the weights themselves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.tiny_models import TINY

# Reading, converting and cutting may take so much besides: some blocks of one tensor, never a
# second copy of the weights.
MARGIN_MIB = 180
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "vocab_size": 40960,
    "num_attention_heads": 16,
    "head_dim": 64,
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
}
PROGRAM = """
import sys
from tandem.config.args import build_config
from tandem.engine.engine import EngineCore

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) // 1024

before = status("VmRSS")
settings = {"arena_mib": 16, "threads": 1, "max_model_len": 256, "max_num_seqs": 2}
core = EngineCore(build_config(sys.argv[1], settings))
print(before, status("VmHWM"), status("VmRSS"))
core.close()
"""


def save_large(folder: Path) -> int:
    """A checkpoint of 200 MiB in shards; returns its size in MiB. Weights are constant."""
    _, arguments = TINY["nemotron_h"]
    config = transformers.NemotronHConfig(**{**arguments, **SIZES})
    with torch.device("meta"):
        model = transformers.NemotronHForCausalLM(config)
    config.architectures = ["NemotronHForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    shards: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for index, (name, value) in enumerate(model.state_dict().items()):
        shards[index % len(shards)][name] = torch.full(value.shape, 0.01, dtype=torch.bfloat16)
    for index, tensors in enumerate(shards):
        name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
    write_index(folder, shards)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) // 2**20


def write_index(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    where = {
        name: f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        for index, tensors in enumerate(shards)
        for name in tensors
    }
    body = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_peak_while_loading_is_the_weights_and_little_more(tmp_path: Path) -> None:
    weights_mib = save_large(tmp_path)
    assert weights_mib > 200
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    before, peak, after = map(int, result.stdout.split())
    assert after - before > 0.8 * weights_mib, "the weights are not all there"
    assert peak - before < weights_mib + MARGIN_MIB
