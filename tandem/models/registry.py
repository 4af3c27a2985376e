"""The families that can be served, and how a folder's config.json finds its own. No torch."""

from dataclasses import replace
from pathlib import Path

from tandem.config.build import check_dtype
from tandem.config.keys import Keys, read_config_json
from tandem.config.model import ModelConfig
from tandem.errors import ModelError
from tandem.models.bailing_hybrid import BAILING_HYBRID
from tandem.models.bamba import BAMBA
from tandem.models.falcon_h1 import FALCON_H1
from tandem.models.family import Family
from tandem.models.granite_hybrid import GRANITE_HYBRID
from tandem.models.jamba import JAMBA
from tandem.models.kimi_linear import KIMI_LINEAR
from tandem.models.lfm2 import LFM2, LFM2_MOE
from tandem.models.llama import LLAMA
from tandem.models.mamba import FALCON_MAMBA, MAMBA
from tandem.models.mamba2 import CODESTRAL_MAMBA, MAMBA2, codestral_keys
from tandem.models.minimax import MINIMAX
from tandem.models.nemotron_h import NEMOTRON_H
from tandem.models.olmo_hybrid import OLMO_HYBRID
from tandem.models.plamo2 import PLAMO2
from tandem.models.qwen3 import QWEN3
from tandem.models.qwen3_next import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_NEXT,
)
from tandem.models.recurrent_gemma import RECURRENT_GEMMA
from tandem.models.zamba import ZAMBA, ZAMBA2

# By model_type of config.json.
FAMILIES: dict[str, Family] = {
    "nemotron_h": NEMOTRON_H,
    "bailing_hybrid": BAILING_HYBRID,
    "bamba": BAMBA,
    "codestral_mamba": CODESTRAL_MAMBA,
    "falcon_h1": FALCON_H1,
    "granitemoehybrid": GRANITE_HYBRID,
    "falcon_mamba": FALCON_MAMBA,
    "jamba": JAMBA,
    "kimi_linear": KIMI_LINEAR,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "llama": LLAMA,
    "mamba": MAMBA,
    "mamba2": MAMBA2,
    "minimax": MINIMAX,
    "minimax_text_01": MINIMAX,
    "olmo_hybrid": OLMO_HYBRID,
    "plamo2": PLAMO2,
    "qwen3": QWEN3,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_next": QWEN3_NEXT,
    "recurrent_gemma": RECURRENT_GEMMA,
    "zamba": ZAMBA,
    "zamba2": ZAMBA2,
}


def load_model_config(
    path: str | Path, *, dtype: str | None = None, state_dtype: str | None = None
) -> ModelConfig:
    """Read the shapes of the model in a local HF folder.

    Args:
        path: folder that holds config.json (or, of Codestral Mamba, params.json), or the file.
        dtype: weights, activations, K/V and conv window; None takes the checkpoint's own.
        state_dtype: recurrent state at rest; None takes the checkpoint's own, else float32.

    Raises: ModelError naming file, key and value.
    """
    keys = _read_keys(Path(path))
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


def _read_keys(path: Path) -> Keys:
    folder = path if path.is_dir() else path.parent
    params = folder / "params.json"
    if not (folder / "config.json").exists() and params.exists():
        return codestral_keys(read_config_json(params), params)
    return Keys(read_config_json(path), folder / "config.json")
