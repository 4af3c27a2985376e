"""The families that can be served, and how a folder's config.json finds its own. No torch."""

from dataclasses import replace
from pathlib import Path

from tandem.config.build import check_dtype
from tandem.config.keys import Keys, read_config_json
from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.models.bamba import BAMBA
from tandem.models.family import Family
from tandem.models.llama import LLAMA
from tandem.models.nemotron_h import NEMOTRON_H
from tandem.models.qwen3 import QWEN3

# By model_type of config.json.
FAMILIES: dict[str, Family] = {
    "nemotron_h": NEMOTRON_H,
    "bamba": BAMBA,
    "llama": LLAMA,
    "qwen3": QWEN3,
}


def load_model_config(
    path: str | Path, *, dtype: str | None = None, state_dtype: str | None = None
) -> ModelConfig:
    """Read the shapes of the model in a local HF folder.

    Args:
        path: folder that holds config.json, or the file.
        dtype: weights, activations, K/V and conv window; None takes the checkpoint's own.
        state_dtype: recurrent state at rest; None takes the checkpoint's own, else float32.

    Raises: ModelError naming file, key and value.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    keys = Keys(read_config_json(path), folder / "config.json")
    family = keys.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        named = keys.get("architectures", default=[])
        architectures = ", ".join(map(str, named)) if isinstance(named, list) else str(named)
        architectures = architectures or "none named"
        raise ModelError(
            f"{keys.source}: model_type={family!r} (architectures: {architectures}) is not "
            f"supported; supported: {', '.join(FAMILIES)}"
        )
    if keys.has("quantization_config"):
        raise ModelError(
            f"{keys.source}: quantization_config is not supported; use an unquantised checkpoint"
        )
    model = FAMILIES[family].read(keys)
    if dtype is not None:
        model = replace(model, dtype=check_dtype(keys.source, "dtype", dtype))
    if state_dtype is not None:
        checked = check_dtype(keys.source, "state_dtype", state_dtype)
        model = replace(model, state_dtype=checked)
    return model
