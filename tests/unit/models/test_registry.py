import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.errors import ModelError, ShardingError
from tandem.layers.parallel import SingleRank
from tandem.models.loader import Model, load_model
from tandem.models.registry import FAMILIES, load_model_config
from tests.stepper import Stepper, random_tokens
from tests.tiny_models import save_tiny

CPU = torch.device("cpu")


def load(folder: Path, tp=None) -> Model:
    config = load_model_config(folder)
    return load_model(folder, config, tp or SingleRank(), CPU, show_progress=False)


def logits(folder: Path) -> torch.Tensor:
    return torch.cat(Stepper(folder).step([(0, random_tokens(9))]))


def test_shards_equal_one_file(tmp_path: Path) -> None:
    whole = save_tiny("nemotron_h", tmp_path / "whole")
    cut = save_tiny("nemotron_h", tmp_path / "cut", max_shard_size="100KB")
    assert len([*cut.glob("*.safetensors")]) > 2
    assert torch.equal(logits(cut), logits(whole))


def test_both_prefixes_and_drafting_heads(tmp_path: Path) -> None:
    folder = save_tiny("nemotron_h_moe", tmp_path)
    expected, file = logits(folder), folder / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("backbone.") for name in tensors)
    renamed = {name.replace("backbone.", "model."): value for name, value in tensors.items()}
    renamed["mtp.layers.0.norm.weight"] = torch.zeros(3)
    save_file(renamed, file)
    assert torch.equal(logits(folder), expected)


def test_tied_head_may_be_absent_but_an_untied_may_not(tmp_path: Path) -> None:
    folder = save_tiny("nemotron_h", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    expected = logits(folder)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 missing: lm_head\.weight"):
        load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize(
    ("name", "overrides", "tp", "component"),
    [
        ("nemotron_h", {}, 3, r"layer 0 mamba2 heads has 8 units.*tp=3"),
        ("nemotron_h", {}, 16, r"layer 0 mamba2 heads has 8 units.*tp=16"),
        ("nemotron_h", {"n_groups": 4, "mamba_num_heads": 12}, 6, r"mamba2 groups has 4 units"),
        ("nemotron_h", {"intermediate_size": 126}, 4, r"layer 1 mlp intermediate channels has 126"),
        ("nemotron_h", {}, 8, r"layer 3 attention heads has 4 units.*tp=8"),
        (
            "nemotron_h",
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            4,
            r"layer 3 attention kv heads has 3 units.*tp=4",
        ),
        (
            "nemotron_h_moe",
            {"moe_intermediate_size": 30},
            4,
            r"layer 1 moe expert intermediate channels has 30 units.*tp=4",
        ),
        (
            "nemotron_h_moe",
            {"moe_shared_expert_intermediate_size": 30},
            4,
            r"layer 1 moe shared_experts\.intermediate channels has 30 units.*tp=4",
        ),
        ("bamba", {}, 3, r"layer 0 mamba2 heads has 8 units.*tp=3"),
    ],
)
def test_tp_that_does_not_divide_is_refused_before_any_file_is_read(
    name: str, overrides: dict, tp: int, component: str, tmp_path: Path
) -> None:
    folder = save_tiny(name, tmp_path, **overrides)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ShardingError, match=component):
        load(folder, SimpleNamespace(rank=0, size=tp))


def test_unknown_family_is_refused(tmp_path: Path) -> None:
    config = replace(load_model_config(save_tiny("bamba", tmp_path)), family="other")
    with pytest.raises(ModelError, match=f"'other'.*{', '.join(FAMILIES)}"):
        load_model(tmp_path, config, SingleRank(), CPU)


def test_decay_step_bias_and_skip_stay_fp32_in_a_16_bit_model(tmp_path: Path) -> None:
    folder = save_tiny("nemotron_h", tmp_path, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    for leaf in ("A_log", "D", "dt_bias"):
        key = f"backbone.layers.0.mixer.{leaf}"
        tensors[key] = tensors[key].float() + 1e-4  # not a bf16 number
    save_file(tensors, folder / "model.safetensors")
    (mixer,) = load(folder)._steps[0].layers
    for leaf, actual in (("D", mixer._D), ("dt_bias", mixer._dt_bias)):
        assert torch.equal(actual, tensors[f"backbone.layers.0.mixer.{leaf}"])
    assert torch.equal(mixer._A, -tensors["backbone.layers.0.mixer.A_log"].exp())
    assert mixer._A.dtype is torch.float32


def test_residual_stream_is_fp32_where_the_config_asks(tmp_path: Path) -> None:
    """The sum of a large residual and small updates keeps what 16 bits would drop."""
    folder = save_tiny("nemotron_h", tmp_path, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.embeddings.weight"].mul_(300)
    save_file(tensors, folder / "model.safetensors")
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    found = {}
    for is_fp32 in (False, True):
        config_file.write_text(json.dumps({**config, "residual_in_fp32": is_fp32}))
        found[is_fp32] = logits(folder)
    config_file.write_text(json.dumps({**config, "dtype": "float32"}))
    exact = logits(folder)
    error = {key: float((value - exact).square().mean()) for key, value in found.items()}
    assert error[True] < 0.5 * error[False]
