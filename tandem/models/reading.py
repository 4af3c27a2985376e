"""What several families spell alike in config.json: heads, rotary positions, layer lists."""

from collections.abc import Mapping, Sequence

from tandem.config.keys import MAX_HEADS, Keys
from tandem.config.model import RotaryConfig
from tandem.errors import ModelError


def read_heads(keys: Keys) -> tuple[int, int]:
    """(query heads, K/V heads)."""
    num_heads = keys.integer("num_attention_heads", maximum=MAX_HEADS)
    num_kv_heads = keys.integer("num_key_value_heads", default=num_heads, maximum=MAX_HEADS)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{keys.source}: num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    return num_heads, num_kv_heads


def read_head_dim(keys: Keys, *names: str) -> int:
    """`names` in order, else the hidden size over the query heads."""
    default = keys.integer("hidden_size") // keys.integer("num_attention_heads", maximum=MAX_HEADS)
    return keys.integer(*(names or ("head_dim",)), default=default)


def read_rotary(
    keys: Keys, head_dim: int, *, theta: float = 10000.0, partial: float = 1.0
) -> RotaryConfig:
    """`theta`, `partial`: of a config that does not say."""
    rope = keys.section("rope_parameters", "rope_scaling")
    rope_type = rope.get("rope_type", "type", default="default")
    if rope_type != "default":
        raise ModelError(
            f"{keys.source}: rope_type={rope_type!r} is not supported for "
            f"{keys.get('model_type')}; expected 'default'"
        )
    theta = rope.number("rope_theta", default=keys.number("rope_theta", default=theta))
    partial = rope.number(
        "partial_rotary_factor", default=keys.number("partial_rotary_factor", default=partial)
    )
    return check_rotary(keys, int(head_dim * min(partial, MAX_HEADS)), head_dim, theta)


def check_rotary(keys: Keys, rotary_dim: int, head_dim: int, theta: float) -> RotaryConfig:
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ModelError(f"{keys.source}: {rotary_dim} rotary dimensions of a {head_dim} wide head")
    return RotaryConfig(rotary_dim, theta)


def check_groups(keys: Keys, num_heads: int, num_groups: int) -> None:
    """Of Mamba-2: each group of B and C serves as many heads."""
    if num_heads % num_groups:
        raise ModelError(
            f"{keys.source}: {num_heads} Mamba heads are not a multiple of {num_groups} groups"
        )


def read_layer_names(keys: Keys, names: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """`known` of each name in the list under the first of the keys `names` that is there."""
    found = keys.get(*names)
    if not isinstance(found, list) or not found:
        raise ModelError(f"{keys.source}: {names[0]}={found!r}; expected a list of names")
    unknown = sorted({str(name) for name in found} - set(known))
    if unknown:
        raise ModelError(
            f"{keys.source}: {names[0]} has {', '.join(unknown)}; supported: {', '.join(known)}"
        )
    return [known[name] for name in found]
