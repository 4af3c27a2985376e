"""The shapes of a model, read from an HF folder's config.json.

This is the only reader of HF keys. It knows no torch, no weights and no tensor parallelism. A
value that is not supported is refused by name; nothing is guessed silently.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tandem.errors import ModelError
from tandem.units import DTYPE_NBYTES


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary position embedding over the first `rotary_dim` of each head (Su et al. 2021)."""

    rotary_dim: int
    theta: float


@dataclass(frozen=True)
class AttentionConfig:
    kind: ClassVar[str] = "attention"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    has_bias: bool
    rotary: RotaryConfig | None


@dataclass(frozen=True)
class Mamba2Config:
    kind: ClassVar[str] = "mamba2"
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_kernel: int
    has_conv_bias: bool
    has_proj_bias: bool
    dt_limit: tuple[float, float]
    chunk_size: int
    norm_eps: float

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class Mamba1Config:
    """Channels with a state of their own and steps of their own (Gu & Dao 2023).

    `num_heads`: runs of channels with B, C and low-rank dt of their own (Zamba); 1 elsewhere.
    `parameter_norm`: RMS norm on B, C and low-rank dt: "none", "plain" (no weights; FalconMamba) or
    "weighted" (Jamba).
    `has_interleaved_gate`: the rows of in_proj are x0, z0, x1, z1, ... (Zamba), not all x, then z.
    """

    kind: ClassVar[str] = "mamba1"
    inner_size: int
    state_size: int
    dt_rank: int
    conv_kernel: int
    has_conv_bias: bool
    has_proj_bias: bool
    parameter_norm: str = "none"
    norm_eps: float = 1e-6
    num_heads: int = 1
    has_interleaved_gate: bool = False


@dataclass(frozen=True)
class ShortConvConfig:
    """A gated short convolution over `num_channels` (LFM2)."""

    kind: ClassVar[str] = "short_conv"
    num_channels: int
    conv_kernel: int
    has_bias: bool


@dataclass(frozen=True)
class GatedDeltaConfig:
    """The gated delta rule (Yang et al. 2024, arXiv:2412.06464).

    `max_beta`: 1, or 2 where negative eigenvalues are allowed. `layout` of the projections in a
    checkpoint: "grouped" (in_proj_qkvz and in_proj_ba by key head: Qwen3-Next), "joined"
    (in_proj_qkv, z, b and a: Qwen3.5) or "split" (q_proj, q_conv1d, ...: OLMo-Hybrid).
    """

    kind: ClassVar[str] = "gated_delta"
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    max_beta: float
    norm_eps: float
    layout: str


@dataclass(frozen=True)
class KimiDeltaConfig:
    """The delta rule with a decay for each key channel (Kimi Team 2025, arXiv:2510.26692).

    `decay_floor`: None, or the (negative) bound of the log-decay of one token. `layout` of a
    checkpoint: "low_rank" (decay and gate through f_a, f_b and g_a, g_b: Kimi-Linear) or "full"
    (f_proj, g_proj, dense: Bailing).
    """

    kind: ClassVar[str] = "kimi_delta"
    num_heads: int
    head_dim: int
    conv_kernel: int
    decay_floor: float | None
    norm_eps: float
    layout: str


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Lightning attention (Qin et al. 2024, arXiv:2405.17381).

    `slopes`: of each head, what its state loses at each token, as a positive log-decay.
    """

    kind: ClassVar[str] = "linear_attention"
    num_heads: int
    head_dim: int
    slopes: tuple[float, ...]
    norm_eps: float


@dataclass(frozen=True)
class RgLruConfig:
    """The real-gated linear recurrent unit (De et al. 2024, arXiv:2402.19427).

    `num_blocks` of `block_size` channels: the blocks of its gates' matrices.
    """

    kind: ClassVar[str] = "rg_lru"
    num_blocks: int
    block_size: int
    conv_kernel: int


@dataclass(frozen=True)
class MlpConfig:
    kind: ClassVar[str] = "mlp"
    intermediate_size: int
    activation: str  # "relu2" (up, down) or "silu_gated" (gate, up, down)
    has_bias: bool


@dataclass(frozen=True)
class MoeConfig:
    """Sigmoid-routed experts with a correction bias, group limits and a shared expert.

    `latent_size`: experts work in a smaller space between two projections (Nemotron-3 Super), else
    None.
    """

    kind: ClassVar[str] = "moe"
    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    latent_size: int | None
    activation: str
    num_groups: int
    topk_groups: int
    normalize_weights: bool
    scaling_factor: float
    has_bias: bool


MixerConfig = (
    AttentionConfig
    | Mamba2Config
    | Mamba1Config
    | ShortConvConfig
    | GatedDeltaConfig
    | KimiDeltaConfig
    | LinearAttentionConfig
    | RgLruConfig
)
FeedForwardConfig = MlpConfig | MoeConfig


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer: mixers that run side by side (0, 1 or 2 of them), then a feed-forward."""

    mixers: tuple[MixerConfig, ...]
    feed_forward: FeedForwardConfig | None


@dataclass(frozen=True)
class ModelConfig:
    """A model as the engine sees it. `name` is what /v1/models shows unless overridden."""

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    dtype: str
    state_dtype: str
    tie_embeddings: bool
    max_position: int
    residual_in_fp32: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    digest: str  # of the shapes that decide what state means; part of the fingerprint

    @property
    def num_layers(self) -> int:
        return len(self.layers)


# Beyond any model: larger numbers are typing errors that would end in sums nobody can allocate.
_MAX_SIZE = 1 << 24
_MAX_HEADS = 1 << 16
_MAX_LAYERS = 1 << 12
_MAX_POSITION = 1 << 31
_FLOAT_MAX = sys.float_info.max


class _Keys:
    """Typed access to config.json; every complaint names the key, the value and the file."""

    def __init__(self, raw: Mapping[str, Any], source: Path) -> None:
        self._raw = raw
        self.source = source

    def has(self, key: str) -> bool:
        return self._raw.get(key) is not None

    def get(self, *keys: str, default: Any = None) -> Any:
        for key in keys:
            if self._raw.get(key) is not None:
                return self._raw[key]
        return default

    def integer(
        self,
        *keys: str,
        default: int | None = None,
        minimum: int = 1,
        maximum: int = _MAX_SIZE,
    ) -> int:
        value = self.get(*keys, default=default)
        name = keys[0]
        if value is None:
            raise ModelError(f"{self.source}: key {name!r} is missing; it must be an integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelError(f"{self.source}: {name}={value!r}; expected an integer >= {minimum}")
        if value > maximum:
            raise ModelError(f"{self.source}: {name} exceeds {maximum}, the largest supported")
        return value

    def number(self, *keys: str, default: float) -> float:
        """Positive and finite, as every number of a model is."""
        value = self.get(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.source}: {keys[0]}={value!r}; expected a number")
        if not 0 < value < _FLOAT_MAX:
            raise ModelError(f"{self.source}: {keys[0]}={value!r}; expected a positive number")
        return float(value)

    def section(self, *keys: str) -> "_Keys":
        """A nested object; empty when no key is given."""
        value = self.get(*keys, default={})
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.source}: {keys[0]}={value!r}; expected a JSON object")
        return _Keys(value, self.source)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default=default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.source}: {key}={value!r}; expected true or false")
        return value

    def one_of(self, key: str, supported: tuple[str, ...], default: str) -> str:
        value = self.get(key, default=default)
        if value not in supported:
            raise ModelError(
                f"{self.source}: {key}={value!r} is not supported; expected one of "
                f"{', '.join(supported)}"
            )
        return str(value)

    def dt_limit(self) -> tuple[float, float]:
        """The explicit limit pair. `time_step_min`/`max` only steer initialisation and are not
        read."""
        limit = self.get("time_step_limit", "mamba_dt_limit", default=(0.0, math.inf))
        try:
            # transformers writes infinity as {"__float__": "Infinity"} or as the bare word.
            low, high = (
                float(bound["__float__"]) if isinstance(bound, Mapping) else float(bound)
                for bound in limit
            )
        except (TypeError, ValueError, KeyError, OverflowError):
            raise ModelError(
                f"{self.source}: time_step_limit={limit!r}; expected two numbers [low, high]"
            ) from None
        if not 0 <= low <= high:
            raise ModelError(f"{self.source}: time_step_limit={limit!r}; expected 0 <= low <= high")
        return low, high


# A config may carry both names; this order decides.
_NORM_EPS = {
    "nemotron_h": ("layer_norm_epsilon", "rms_norm_eps"),
    "bamba": ("rms_norm_eps",),
}
_PATTERN = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}
_BLOCK_TYPES = {
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


def _nemotron_layer_kinds(keys: _Keys) -> list[str]:
    pattern = keys.get("hybrid_override_pattern")
    names = keys.get("layers_block_type", "layer_types")
    if names is not None:
        if not isinstance(names, list) or not names:
            raise ModelError(
                f"{keys.source}: layers_block_type={names!r}; expected a list of names"
            )
        unknown = sorted({str(name) for name in names} - set(_BLOCK_TYPES))
        if unknown:
            raise ModelError(
                f"{keys.source}: layers_block_type has {', '.join(unknown)}; "
                f"supported: {', '.join(_BLOCK_TYPES)}"
            )
        return [_BLOCK_TYPES[name] for name in names]
    if not isinstance(pattern, str) or not pattern:
        raise ModelError(
            f"{keys.source}: neither layers_block_type nor hybrid_override_pattern is given"
        )
    unknown = sorted(set(pattern) - set(_PATTERN))
    if unknown:
        raise ModelError(
            f"{keys.source}: hybrid_override_pattern has {', '.join(unknown)!r}; "
            f"supported: {' '.join(_PATTERN)}"
        )
    return [_PATTERN[letter] for letter in pattern]


def _heads(keys: _Keys) -> tuple[int, int]:
    num_heads = keys.integer("num_attention_heads", maximum=_MAX_HEADS)
    num_kv_heads = keys.integer("num_key_value_heads", default=num_heads, maximum=_MAX_HEADS)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{keys.source}: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    return num_heads, num_kv_heads


def _check_groups(keys: _Keys, num_heads: int, num_groups: int) -> None:
    if num_heads % num_groups:
        raise ModelError(
            f"{keys.source}: {num_heads} Mamba heads are not a multiple of {num_groups} groups"
        )


def _nemotron_layers(keys: _Keys) -> tuple[LayerConfig, ...]:
    hidden_size = keys.integer("hidden_size")
    num_heads, num_kv_heads = _heads(keys)
    head_dim = keys.integer("head_dim", "attention_head_dim", default=hidden_size // num_heads)
    if keys.has("sliding_window"):
        raise ModelError(
            f"{keys.source}: sliding_window is not supported for nemotron_h; remove it"
        )
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        has_bias=keys.flag("attention_bias", False),
        rotary=None,
    )
    norm_eps = keys.number(*_NORM_EPS["nemotron_h"], default=1e-5)
    keys.one_of("mamba_hidden_act", ("silu",), "silu")
    mamba = Mamba2Config(
        num_heads=keys.integer("mamba_num_heads", maximum=_MAX_HEADS),
        head_dim=keys.integer("mamba_head_dim"),
        num_groups=keys.integer("n_groups", "mamba_n_groups", default=8),
        state_size=keys.integer("ssm_state_size"),
        conv_kernel=keys.integer("conv_kernel", "mamba_d_conv", default=4, minimum=2),
        has_conv_bias=keys.flag("use_conv_bias", True),
        # `mamba_proj_bias` stands in published configs too, but no projection follows it.
        has_proj_bias=keys.flag("use_bias", False),
        dt_limit=keys.dt_limit(),
        chunk_size=keys.integer("chunk_size", "mamba_chunk_size", default=128),
        norm_eps=norm_eps,
    )
    _check_groups(keys, mamba.num_heads, mamba.num_groups)
    activation = keys.one_of("mlp_hidden_act", ("relu2",), "relu2")
    has_mlp_bias = keys.flag("mlp_bias", False)
    layers = []
    for kind in _nemotron_layer_kinds(keys):
        if kind == "mamba2":
            layers.append(LayerConfig((mamba,), None))
        elif kind == "attention":
            layers.append(LayerConfig((attention,), None))
        elif kind == "mlp":
            size = keys.integer("intermediate_size")
            layers.append(LayerConfig((), MlpConfig(size, activation, has_mlp_bias)))
        else:
            layers.append(LayerConfig((), _nemotron_moe(keys, activation, has_mlp_bias)))
    return tuple(layers)


def _nemotron_moe(keys: _Keys, activation: str, has_bias: bool) -> MoeConfig:
    num_experts = keys.integer("n_routed_experts", "num_local_experts")
    num_groups = keys.integer("n_group", default=1)
    topk_groups = keys.integer("topk_group", default=1)
    top_k = keys.integer("num_experts_per_tok")
    if num_experts % num_groups or topk_groups > num_groups:
        raise ModelError(
            f"{keys.source}: {num_experts} experts in n_group={num_groups} with "
            f"topk_group={topk_groups}; groups must divide experts and cover topk_group"
        )
    if top_k > num_experts // num_groups * topk_groups:
        raise ModelError(
            f"{keys.source}: num_experts_per_tok={top_k} exceeds those in {topk_groups} groups"
        )
    num_shared = keys.integer("n_shared_experts", default=1, minimum=0)
    if num_shared > 1:
        raise ModelError(
            f"{keys.source}: n_shared_experts={num_shared} is not supported; expected 0 or 1"
        )
    shared_size = keys.integer("moe_shared_expert_intermediate_size") if num_shared else 0
    latent_size = keys.get("moe_latent_size")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=keys.integer("moe_intermediate_size"),
        shared_intermediate_size=shared_size,
        latent_size=None if latent_size is None else keys.integer("moe_latent_size"),
        activation=activation,
        num_groups=num_groups,
        topk_groups=topk_groups,
        normalize_weights=keys.flag("norm_topk_prob", True),
        scaling_factor=keys.number("routed_scaling_factor", default=1.0),
        has_bias=has_bias,
    )


def _bamba_layers(keys: _Keys) -> tuple[LayerConfig, ...]:
    hidden_size = keys.integer("hidden_size")
    num_layers = keys.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    num_heads, num_kv_heads = _heads(keys)
    head_dim = keys.integer("head_dim", default=hidden_size // num_heads)
    rope = keys.section("rope_parameters", "rope_scaling")
    rope_type = rope.get("rope_type", "type", default="default")
    if rope_type != "default":
        raise ModelError(
            f"{keys.source}: rope_type={rope_type!r} is not supported for bamba; expected 'default'"
        )
    theta = rope.number("rope_theta", default=keys.number("rope_theta", default=10000.0))
    # Bamba rotates half of each head; published configs carry `attn_rotary_emb` or nothing.
    partial = rope.number("partial_rotary_factor", default=0.5)
    rotary_dim = keys.integer("attn_rotary_emb", default=int(head_dim * min(partial, _MAX_HEADS)))
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ModelError(f"{keys.source}: {rotary_dim} rotary dimensions of a {head_dim} wide head")
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        has_bias=keys.flag("attention_bias", False),
        rotary=RotaryConfig(rotary_dim, theta),
    )
    mamba_heads = keys.integer("mamba_n_heads", maximum=_MAX_HEADS)
    inner_size = keys.integer("mamba_expand", default=2) * hidden_size
    if keys.get("mamba_d_head", default="auto") == "auto":
        mamba_dim = inner_size // mamba_heads
    else:
        mamba_dim = keys.integer("mamba_d_head")
    if mamba_heads * mamba_dim != inner_size:
        raise ModelError(
            f"{keys.source}: mamba_n_heads={mamba_heads} heads of mamba_d_head={mamba_dim} are not "
            f"mamba_expand * hidden_size = {inner_size} wide"
        )
    keys.one_of("hidden_act", ("silu",), "silu")
    norm_eps = keys.number(*_NORM_EPS["bamba"], default=1e-5)
    mamba = Mamba2Config(
        num_heads=mamba_heads,
        head_dim=mamba_dim,
        num_groups=keys.integer("mamba_n_groups", default=1),
        state_size=keys.integer("mamba_d_state", default=256),
        conv_kernel=keys.integer("mamba_d_conv", default=4, minimum=2),
        has_conv_bias=keys.flag("mamba_conv_bias", True),
        has_proj_bias=keys.flag("mamba_proj_bias", False),
        dt_limit=keys.dt_limit(),
        chunk_size=keys.integer("mamba_chunk_size", default=256),
        norm_eps=norm_eps,
    )
    _check_groups(keys, mamba.num_heads, mamba.num_groups)
    mlp = MlpConfig(keys.integer("intermediate_size"), "silu_gated", keys.flag("mlp_bias", False))
    attention_layers = keys.get("attn_layer_indices", default=[])
    if not isinstance(attention_layers, list) or not all(
        type(index) is int and 0 <= index < num_layers for index in attention_layers
    ):
        raise ModelError(
            f"{keys.source}: attn_layer_indices={attention_layers!r}; expected a list of numbers "
            f"in 0..{num_layers - 1}"
        )
    return tuple(
        LayerConfig((attention if index in attention_layers else mamba,), mlp)
        for index in range(num_layers)
    )


_FAMILIES: dict[str, Callable[[_Keys], tuple[LayerConfig, ...]]] = {
    "nemotron_h": _nemotron_layers,
    "bamba": _bamba_layers,
}


def read_config_json(path: str | Path) -> dict[str, Any]:
    """Return config.json of a model folder (or of the file itself); raises ModelError."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        raise ModelError(
            f"{file} does not exist; expected a local HF model folder with config.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: coding, syntax, digits
        raise ModelError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{file} holds {type(raw).__name__}; expected a JSON object")
    return raw


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
    raw = read_config_json(path)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    keys = _Keys(raw, folder / "config.json")
    family = keys.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        named = keys.get("architectures", default=[])
        architectures = ", ".join(map(str, named)) if isinstance(named, list) else str(named)
        architectures = architectures or "none named"
        raise ModelError(
            f"{keys.source}: model_type={family!r} (architectures: {architectures}) is not "
            f"supported; supported: {', '.join(_FAMILIES)}"
        )
    if keys.has("quantization_config"):
        raise ModelError(
            f"{keys.source}: quantization_config is not supported; use an unquantised checkpoint"
        )
    layers = _FAMILIES[family](keys)
    stored_dtype = str(keys.get("dtype", "torch_dtype", default="float32")).removeprefix("torch.")
    stored_state = str(keys.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype", default="float32"))
    shape = (family, keys.integer("vocab_size"), keys.integer("hidden_size"), layers)
    return ModelConfig(
        name=folder.resolve().name,
        family=family,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        layers=layers,
        norm_eps=keys.number(*_NORM_EPS[family], default=1e-5),
        dtype=_checked_dtype(keys, "dtype", dtype or stored_dtype),
        state_dtype=_checked_dtype(keys, "state_dtype", state_dtype or stored_state),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        max_position=keys.integer(
            "max_position_embeddings", default=1 << 18, maximum=_MAX_POSITION
        ),
        residual_in_fp32=keys.flag("residual_in_fp32", False),
        bos_token_id=keys.get("bos_token_id"),
        eos_token_ids=_eos_token_ids(keys, folder),
        pad_token_id=keys.get("pad_token_id"),
        digest=hashlib.sha256(repr(shape).encode()).hexdigest()[:16],
    )


def _eos_token_ids(keys: _Keys, folder: Path) -> tuple[int, ...]:
    """Ids of config.json, then those that generation_config.json adds: chat models end a turn with
    a token that only the latter names."""
    sources = [keys]
    generation = folder / "generation_config.json"
    if generation.exists():
        sources.append(_Keys(read_config_json(generation), generation))
    vocab_size = keys.integer("vocab_size")
    found: list[int] = []
    for source in sources:
        value = source.get("eos_token_id", default=[])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
            raise ModelError(
                f"{source.source}: eos_token_id={value!r}; expected a token id or a list of them"
            )
        if any(not 0 <= item < vocab_size for item in ids):
            raise ModelError(
                f"{source.source}: eos_token_id={value!r}; expected ids within vocab_size="
                f"{vocab_size}"
            )
        found += ids
    return tuple(dict.fromkeys(found))


def _checked_dtype(keys: _Keys, name: str, dtype: str) -> str:
    if dtype not in DTYPE_NBYTES:
        raise ModelError(
            f"{keys.source}: {name}={dtype!r} is not supported; expected one of "
            f"{', '.join(DTYPE_NBYTES)}"
        )
    return dtype
