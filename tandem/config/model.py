"""The shapes and constants of a model, as the engine sees them.

It knows no HF keys (models/ reads them), no torch, no weights and no tensor parallelism.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol


class MixerConfig(Protocol):
    """A part that looks at other tokens. `kind` names the state it keeps (state/kinds.py)."""

    kind: ClassVar[str]


class FeedForwardConfig(Protocol):
    """A part that looks at each token alone."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class RotaryScaling:
    """Longer contexts than those trained on: slow frequencies are divided by `factor`, fast ones
    stay, with a ramp between `slow_turns` and `fast_turns` turns within `original_length` tokens.

    kind: "linear" (all are divided), "llama3" (the ramp goes with turns) or "yarn" (with channels;
        Peng et al. 2023, arXiv:2309.00071). `is_rounded`: yarn's ramp begins and ends on channels.
    magnitude: factor on cosines and sines.
    """

    kind: str
    factor: float
    original_length: int = 0
    slow_turns: float = 1.0
    fast_turns: float = 32.0
    magnitude: float = 1.0
    is_rounded: bool = True


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary position embedding over the first `rotary_dim` of each head (Su et al. 2021)."""

    rotary_dim: int
    theta: float
    scaling: RotaryScaling | None = None


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention; `rotary` None: no positions.

    qk_norm: RMS norm of queries and keys: "none", "head" (each head by itself), "scaled_head" (so,
        with weights of its own) or "whole" (all heads together).
    has_gate: the output is multiplied by sigmoid(gate) before the last projection; the checkpoint's
        q_proj gives each head's query, then its gate.
    has_out_bias: None: as `has_bias`.
    window: a token sees so many tokens, itself among them; None: all before it.
    input_size: width of what queries, keys and values come from; None: the hidden size.
    """

    kind: ClassVar[str] = "attention"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    has_bias: bool
    rotary: RotaryConfig | None
    qk_norm: str = "none"
    norm_eps: float = 1e-6
    has_gate: bool = False
    has_out_bias: bool | None = None
    window: int | None = None
    input_size: int | None = None


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Attention whose keys and values come from a latent vector a token (DeepSeek-AI 2024).

    A head's query and key have `nope_dim` channels without positions and `rope_dim` with; its value
    has `value_dim`. `query_rank`: queries come from a smaller space too, else None.
    is_interleaved: a checkpoint's channels turn in pairs (0, 1), (2, 3), ...
    has_head_gate: each head's output is multiplied by the sigmoid of one more projection.
    """

    kind: ClassVar[str] = "latent_attention"
    num_heads: int
    latent_size: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    has_bias: bool
    rotary: RotaryConfig | None
    norm_eps: float = 1e-6
    query_rank: int | None = None
    is_interleaved: bool = False
    has_head_gate: bool = False

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class Mamba2Config:
    """Heads with a scalar decay each (Dao & Gu 2024).

    norm: of the output, in as many groups as B and C: "gated" (of y * silu(z)), "before_gate" (of
        y, which is then multiplied by silu(z)) or "none" (y * silu(z)).
    has_out_bias: None: as `has_proj_bias`.
    """

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
    norm: str = "gated"
    has_out_bias: bool | None = None

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class LowRankMamba2Config:
    """Mamba-2's heads and scan, with step size, B and C from the convolved channels (PLaMo-2)."""

    kind: ClassVar[str] = "low_rank_mamba2"
    num_heads: int
    head_dim: int
    state_size: int
    dt_rank: int
    conv_kernel: int
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
    `is_by_head`: x_proj, dt_proj, A and D are stored by head, and the rows of in_proj are x0, z0,
    x1, z1, ... (Zamba), not all x, then all z.
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
    is_by_head: bool = False


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
class SharedBlockConfig:
    """Attention and an MLP with shared weights in front of a mixer (Zamba).

    block: which of the shared blocks. owns_weights: this layer is the first of those that use it.
    attention_rank, mlp_rank: of what each use adds to the shared projections; None for nothing.
    """

    kind: ClassVar[str] = "shared_block"
    block: int
    owns_weights: bool
    attention: AttentionConfig
    mlp: "MlpConfig"
    mixer: Mamba1Config | Mamba2Config
    norm_eps: float
    attention_rank: int | None = None
    mlp_rank: int | None = None


@dataclass(frozen=True)
class MlpConfig:
    kind: ClassVar[str] = "mlp"
    intermediate_size: int
    activation: str  # "relu2" (up, down) or gated (gate, up, down): silu_, gelu_ or gelu_tanh_gated
    has_bias: bool


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts with group limits, and a shared expert for all tokens.

    latent_size: experts work in a smaller space between two projections (Nemotron-3 Super), else
        None.
    shared_intermediate_size: 0 for no shared expert. has_shared_gate: the shared expert's output is
        multiplied by the sigmoid of one more projection (Qwen).
    score: of the router: "sigmoid" or "softmax". has_correction_bias: added to scores for the
        choice alone.
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
    score: str = "sigmoid"
    has_correction_bias: bool = True
    has_shared_gate: bool = False


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer: mixers that run side by side (0, 1 or 2 of them), then a feed-forward."""

    mixers: tuple[MixerConfig, ...]
    feed_forward: FeedForwardConfig | None


@dataclass(frozen=True)
class ModelConfig:
    """A model as the engine sees it. `name` is what /v1/models shows unless overridden.

    norm_offset: added to the stored weights of norms: 1 where they are stored around zero.
    embedding_scale, logits_scale: factors on embedded tokens and on logits.
    logits_softcap: c of c * tanh(logits / c), after the factor; None leaves them.
    state_rounding: of a 16-bit state: "nearest" or "stochastic".
    multipliers: the family's constant factors of linear maps by its own names; `Family.parts`
        folds them into the weights they belong to.
    """

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
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    multipliers: tuple[tuple[str, float], ...] = ()
    state_rounding: str = "nearest"

    @property
    def num_layers(self) -> int:
        return len(self.layers)
