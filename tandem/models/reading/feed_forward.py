"""MLPs and experts as config.json spells them. No torch."""

from typing import Any

from tandem.config.keys import Keys
from tandem.config.model import MlpConfig, MoeConfig
from tandem.errors import ModelError


def read_gated_mlp(keys: Keys, *names: str) -> MlpConfig:
    """Three projections around silu; `names`: keys of the inner size."""
    keys.one_of("hidden_act", ("silu",), "silu")
    size = keys.integer(*(names or ("intermediate_size",)))
    return MlpConfig(size, "silu_gated", keys.flag("mlp_bias", False))


def read_experts(
    keys: Keys,
    *,
    num_experts: int,
    intermediate_size: int,
    activation: str = "silu_gated",
    normalize: bool = True,
    scaling_factor: float = 1.0,
    shared_size: int = 0,
    **options: Any,
) -> MoeConfig:
    """Routed experts with `num_experts_per_tok` for each token; `options`: other fields."""
    fields = {
        "latent_size": None,
        "num_groups": 1,
        "topk_groups": 1,
        "has_bias": False,
        "has_correction_bias": False,
        **options,
    }
    top_k = keys.integer("num_experts_per_tok", "num_experts_per_token")
    allowed = num_experts // fields["num_groups"] * fields["topk_groups"]
    if num_experts % fields["num_groups"] or fields["topk_groups"] > fields["num_groups"]:
        raise ModelError(
            f"{keys.source}: {num_experts} experts in n_group={fields['num_groups']} with "
            f"topk_group={fields['topk_groups']}; groups must divide experts and cover topk_group"
        )
    if top_k > allowed:
        raise ModelError(
            f"{keys.source}: num_experts_per_tok={top_k} exceeds the {allowed} experts in "
            f"{fields['topk_groups']} of {fields['num_groups']} groups"
        )
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=intermediate_size,
        shared_intermediate_size=shared_size,
        activation=activation,
        normalize_weights=normalize,
        scaling_factor=scaling_factor,
        **fields,
    )


def read_shared_experts(
    keys: Keys, *, num_experts: int, shared_key: str, normalize_key: str
) -> MoeConfig:
    """Sigmoid-routed experts in groups, with shared ones joined to a wider one (DeepSeek)."""
    size = keys.integer("moe_intermediate_size")
    return read_experts(
        keys,
        num_experts=num_experts,
        intermediate_size=size,
        shared_size=size * keys.integer(shared_key, "n_shared_experts", default=1, minimum=0),
        normalize=keys.flag(normalize_key, keys.flag("norm_topk_prob", True)),
        scaling_factor=keys.number("routed_scaling_factor", default=1.0),
        num_groups=keys.integer("num_expert_group", "n_group", default=1),
        topk_groups=keys.integer("topk_group", default=1),
        has_correction_bias=True,
    )
