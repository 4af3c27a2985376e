"""Mamba (Gu & Dao 2023, arXiv:2312.00752) and FalconMamba (TII 2024, arXiv:2410.05355), which norms
step size, B and C without weights.
"""

from dataclasses import replace

from tandem.config.build import build_model_config
from tandem.config.keys import Keys
from tandem.config.model import LayerConfig, Mamba1Config, ModelConfig
from tandem.models.family import Branch, Family, Part, pre_normed
from tandem.models.reading import read_num_layers
from tandem.units import ceil_div


def _read(keys: Keys, parameter_norm: str) -> ModelConfig:
    keys.one_of("hidden_act", ("silu",), "silu")
    hidden_size = keys.integer("hidden_size")
    expanded = keys.integer("expand", default=2) * hidden_size
    is_auto = keys.get("time_step_rank", default="auto") == "auto"
    mamba = Mamba1Config(
        inner_size=keys.integer("intermediate_size", default=expanded),
        state_size=keys.integer("state_size", default=16),
        dt_rank=ceil_div(hidden_size, 16) if is_auto else keys.integer("time_step_rank"),
        conv_kernel=keys.integer("conv_kernel", default=4, minimum=2),
        has_conv_bias=keys.flag("use_conv_bias", True),
        has_proj_bias=keys.flag("use_bias", False),
        parameter_norm=parameter_norm,
        norm_eps=keys.number("mixer_rms_eps", default=1e-6),
    )
    return build_model_config(
        keys,
        layers=(LayerConfig((mamba,), None),) * read_num_layers(keys),
        norm_eps=keys.number("layer_norm_epsilon", default=1e-5),
        residual_in_fp32=keys.flag("residual_in_fp32", True),
        tie_embeddings=True,
    )


def mamba_parts(config: ModelConfig) -> list[Part]:
    """Of models that are mixers alone."""
    parts: list[Part] = []
    for index, layer in enumerate(config.layers):
        mixer = Branch(f"layers.{index}.mixer.", layer.mixers[0])
        parts += pre_normed(index, [mixer], [], mixer_norm="norm")
    return parts


MAMBA = Family(
    title="Mamba",
    read=lambda keys: _read(keys, "none"),
    parts=mamba_parts,
    kinds=("mamba1",),
    prefixes=("backbone.",),
    embedding="embeddings.weight",
    final_norm="norm_f.weight",
)
FALCON_MAMBA = replace(MAMBA, title="Falcon Mamba", read=lambda keys: _read(keys, "plain"))
