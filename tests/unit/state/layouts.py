"""Small models of any shape, and the identity of every byte of their state."""

from functools import cache

from tandem.config.model import (
    AttentionConfig,
    LayerConfig,
    Mamba1Config,
    Mamba2Config,
    MixerConfig,
    ModelConfig,
)
from tandem.state.spec import PlacedComponent, StateSpec

# Where a byte of state belongs in the model, whoever holds it: (layer, component, unit, place in
# the unit); the place of per-token components is (plane, token, byte of the row).
Identity = tuple[int, str, int, object]


def attention(num_kv_heads: int, head_dim: int) -> AttentionConfig:
    return AttentionConfig(
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=1.0,
        has_bias=False,
        rotary=None,
    )


def mamba2(
    num_heads: int, num_groups: int, *, head_dim: int = 2, state_size: int = 3, conv_kernel: int = 4
) -> Mamba2Config:
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=state_size,
        conv_kernel=conv_kernel,
        has_conv_bias=True,
        has_proj_bias=False,
        dt_limit=(0.0, float("inf")),
        chunk_size=16,
        norm_eps=1e-5,
    )


def mamba1(channels: int, *, state_size: int = 3, conv_kernel: int = 4) -> Mamba1Config:
    return Mamba1Config(
        inner_size=channels,
        state_size=state_size,
        dt_rank=1,
        conv_kernel=conv_kernel,
        has_conv_bias=True,
        has_proj_bias=False,
    )


def model(
    *layers: tuple[MixerConfig, ...],
    dtype: str = "bfloat16",
    state_dtype: str = "float32",
) -> ModelConfig:
    """Each argument holds the mixers of one layer."""
    return ModelConfig(
        name="tiny",
        family="nemotron_h",
        vocab_size=16,
        hidden_size=8,
        layers=tuple(LayerConfig(mixers, None) for mixers in layers),
        norm_eps=1e-5,
        dtype=dtype,
        state_dtype=state_dtype,
        tie_embeddings=False,
        max_position=1024,
        residual_in_fp32=False,
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
        digest="tiny",
    )


@cache
def byte_map(spec: StateSpec, part: str, *, first_token: int = 0) -> tuple[Identity | None, ...]:
    """The identity of each byte of a page or slot; None for padding. A plain loop over bytes."""
    nbytes = spec.page_nbytes if part == "page" else spec.slot_nbytes
    found: list[Identity | None] = [None] * nbytes
    for item in spec.part(part):
        for index, unit in enumerate(item.units):
            for byte in range(item.unit_nbytes):
                offset = item.offset + index * item.unit_nbytes + byte
                assert found[offset] is None
                place = _place(item, spec, byte, first_token) if part == "page" else byte
                found[offset] = (item.layer, item.name, unit, place)
    return tuple(found)


def _place(item: PlacedComponent, spec: StateSpec, byte: int, first_token: int) -> object:
    """A unit of K/V is [plane, token, row]."""
    row_nbytes = item.unit_nbytes // (item.unit_shape[0] * spec.page_tokens)
    row, in_row = divmod(byte, row_nbytes)
    plane, token = divmod(row, spec.page_tokens)
    return plane, first_token + token, in_row


def pages_map(spec: StateSpec, num_pages: int) -> list[tuple[Identity | None, ...]]:
    """`byte_map` of consecutive pages of one sequence."""
    return [
        byte_map(spec, "page", first_token=page * spec.page_tokens) for page in range(num_pages)
    ]
