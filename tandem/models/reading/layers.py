"""Which kind each layer is, as config.json spells it. No torch."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from tandem.config.keys import MAX_LAYERS, Keys
from tandem.errors import ModelError

T = TypeVar("T")


def read_num_layers(keys: Keys) -> int:
    return keys.integer("num_hidden_layers", maximum=MAX_LAYERS)


def read_attention_layers(keys: Keys) -> list[bool]:
    """Which layers are full attention among those of linear attention: the list of layer types, or
    every so many layers the last."""
    if keys.has("layer_types"):
        return read_layer_names(
            keys,
            ("layer_types",),
            {"linear_attention": False, "full_attention": True},
            count=read_num_layers(keys),
        )
    interval = keys.integer("full_attention_interval", default=4)
    return [(index + 1) % interval == 0 for index in range(read_num_layers(keys))]


def read_layer_names(
    keys: Keys, names: Sequence[str], known: Mapping[str, T], *, count: int | None = None
) -> list[T]:
    """`known` of each name in the list under the first of the keys `names` that is there; `count`:
    how many there must be."""
    found = keys.get(*names)
    if not isinstance(found, list) or not found:
        raise ModelError(f"{keys.source}: {names[0]}={found!r}; expected a list of names")
    unknown = sorted({str(name) for name in found} - set(known))
    if unknown:
        raise ModelError(
            f"{keys.source}: {names[0]} has {', '.join(unknown)}; supported: {', '.join(known)}"
        )
    if count is not None and len(found) != count:
        raise ModelError(
            f"{keys.source}: {names[0]} names {len(found)} layers; expected {count}, as "
            "num_hidden_layers says"
        )
    return [known[str(name)] for name in found]
