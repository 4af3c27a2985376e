"""What one layer stores, as named components that tensor parallelism divides into whole units.

Everything about state (sizes, views, descriptors, unequal tensor parallelism, fingerprints)
follows from the `StateSpec` built here. It knows no kinds: state/kinds.py says which components a
mixer has.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tandem.config.model import ModelConfig
from tandem.errors import ShardingError
from tandem.state.kinds import Component, components_of
from tandem.units import align_up, dtype_nbytes

# Components start on these boundaries: vector loads and RDMA both like them.
COMPONENT_ALIGNMENT = 256


def owned(units: int, tp: int, rank: int, *, component: str = "component") -> range:
    """The global unit ids that a rank holds.

    `units % tp == 0`: equal shares. `tp % units == 0`: each unit is replicated on `tp / units`
    ranks.
    Raises: ShardingError naming component, units and tp for anything else.
    """
    if not 0 <= rank < tp:
        raise ShardingError(f"rank={rank} is outside 0..{tp - 1} of tp={tp}")
    if units % tp == 0:
        share = units // tp
        return range(rank * share, (rank + 1) * share)
    if tp % units == 0:
        unit = rank // (tp // units)
        return range(unit, unit + 1)
    raise ShardingError(
        f"{component} has {units} units, which neither divide by nor replicate to tp={tp}; "
        f"use a tp that divides {units} or is a multiple of it"
    )


@dataclass(frozen=True)
class LayerComponent:
    """A component that one layer keeps, and the kind of mixer that it belongs to."""

    layer: int
    kind: str
    component: Component


@dataclass(frozen=True)
class PlacedComponent:
    """A component of one layer at its place inside a page or slot of one rank.

    `offset` counts bytes from the start of the page or slot; units lie side by side from there.
    """

    layer: int
    name: str
    offset: int
    unit_nbytes: int
    unit_start: int  # global unit ids on this rank: [unit_start, unit_stop)
    unit_stop: int
    unit_shape: tuple[int, ...]
    dtype: str

    @property
    def units(self) -> range:
        return range(self.unit_start, self.unit_stop)

    @property
    def nbytes(self) -> int:
        return (self.unit_stop - self.unit_start) * self.unit_nbytes


@dataclass(frozen=True)
class StateSpec:
    """Where every component of a model lies inside the pages and slots of one rank.

    Page: `[layer][head][k|v][token][head_dim]`. Slot: `[layer][component][unit...]`, each aligned
    to 256 B.
    """

    tp: int
    rank: int
    page_tokens: int
    page: tuple[PlacedComponent, ...]
    slot: tuple[PlacedComponent, ...]
    page_nbytes: int
    slot_nbytes: int

    def part(self, name: str) -> tuple[PlacedComponent, ...]:
        """The components of `"page"` or `"slot"`."""
        return {"page": self.page, "slot": self.slot}[name]


def build_state_spec(model: ModelConfig, *, tp: int, rank: int, page_tokens: int) -> StateSpec:
    """Lay out the pages and slots of one rank. Same sizes on every rank of one engine.

    Raises: ShardingError if a component's units do not fit the tp.
    """
    return place_components(components(model), tp=tp, rank=rank, page_tokens=page_tokens)


def components(model: ModelConfig) -> tuple[LayerComponent, ...]:
    """What a model keeps, in memory order."""
    return tuple(
        LayerComponent(layer, mixer.kind, component)
        for layer, layer_config in enumerate(model.layers)
        for mixer in layer_config.mixers
        for component in components_of(mixer, model.dtype, model.state_dtype)
    )


def place_components(
    kept: Sequence[LayerComponent], *, tp: int, rank: int, page_tokens: int
) -> StateSpec:
    """Lay out components, whatever their kinds, in the pages and slots of one rank.

    Raises: ShardingError naming layer, kind, component, units and tp.
    """
    # Two ranks pair components by layer and name.
    names = {(item.layer, item.component.name) for item in kept}
    assert len(names) == len(kept), "two components of one layer have the same name"
    page: list[PlacedComponent] = []
    slot: list[PlacedComponent] = []
    page_offset = slot_offset = 0
    for item in kept:
        component = item.component
        name = f"layer {item.layer} {item.kind} {component.name}"
        units = owned(component.units, tp, rank, component=name)
        unit_nbytes = prod(component.unit_shape) * dtype_nbytes(component.dtype)
        if component.per_token:
            unit_nbytes *= page_tokens
        placed = PlacedComponent(
            layer=item.layer,
            name=component.name,
            offset=page_offset if component.per_token else slot_offset,
            unit_nbytes=unit_nbytes,
            unit_start=units.start,
            unit_stop=units.stop,
            unit_shape=component.unit_shape,
            dtype=component.dtype,
        )
        if component.per_token:
            page.append(placed)
            page_offset += placed.nbytes
        else:
            slot.append(placed)
            slot_offset = align_up(slot_offset + placed.nbytes, COMPONENT_ALIGNMENT)
    return StateSpec(
        tp=tp,
        rank=rank,
        page_tokens=page_tokens,
        page=tuple(page),
        slot=tuple(slot),
        page_nbytes=page_offset,
        slot_nbytes=slot_offset,
    )


def describe_components(
    model: ModelConfig,
) -> tuple[tuple[int, str, int, tuple[int, ...], str], ...]:
    """(layer, name, units, unit_shape, dtype) of every component: what two engines must agree
    on."""
    return tuple(
        (
            item.layer,
            f"{item.kind}.{item.component.name}",
            item.component.units,
            item.component.unit_shape,
            item.component.dtype,
        )
        for item in components(model)
    )


def fingerprint(model: ModelConfig) -> str:
    """Digest of the model's shapes and of every component; equal on engines that may exchange
    state."""
    text = repr((model.digest, describe_components(model)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
