"""What several families spell alike in config.json. No torch."""

from tandem.models.reading.attention import (
    check_rotary,
    read_attention,
    read_head_dim,
    read_heads,
    read_latent_attention,
    read_rotary,
    refuse_window,
)
from tandem.models.reading.feed_forward import read_experts, read_gated_mlp, read_shared_experts
from tandem.models.reading.layers import read_attention_layers, read_layer_names, read_num_layers
from tandem.models.reading.recurrent import check_groups, read_gated_delta, read_mamba2

__all__ = [
    "check_groups",
    "check_rotary",
    "read_attention",
    "read_attention_layers",
    "read_experts",
    "read_gated_delta",
    "read_gated_mlp",
    "read_head_dim",
    "read_heads",
    "read_latent_attention",
    "read_layer_names",
    "read_mamba2",
    "read_num_layers",
    "read_rotary",
    "read_shared_experts",
    "refuse_window",
]
