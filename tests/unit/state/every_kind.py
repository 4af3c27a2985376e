"""Components of every kind of state that models of this family keep, also of those that no layer
serves yet: the layout, the plans and the transfer know components, not kinds."""

from collections.abc import Callable

from hypothesis import strategies as st

from tandem.state.kinds import Component
from tandem.state.spec import LayerComponent

Components = tuple[Component, ...]

# Multiples and divisors of the sizes of TP, and some that fit few of them.
HEADS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24])
CHANNELS = st.sampled_from([8, 12, 24])
WIDTH = st.integers(1, 3)
DTYPE = st.sampled_from(["bfloat16", "float32"])
TAPS = st.integers(1, 3)


@st.composite
def attention(draw) -> Components:
    """Full and sliding-window attention keep the same."""
    return (Component("kv", draw(HEADS), (2, draw(WIDTH)), draw(DTYPE), per_token=True),)


@st.composite
def latent_attention(draw) -> Components:
    """One latent vector a token, on every rank."""
    return (Component("latent", 1, (1, draw(st.integers(1, 5))), draw(DTYPE), per_token=True),)


@st.composite
def mamba1(draw) -> Components:
    channels = draw(CHANNELS)
    return (
        Component("conv.x", channels, (draw(TAPS),), draw(DTYPE)),
        Component("ssm", channels, (draw(WIDTH),), draw(DTYPE)),
    )


@st.composite
def mamba2(draw) -> Components:
    heads, groups = draw(CHANNELS), draw(HEADS)
    width, state, taps, dtype = draw(WIDTH), draw(WIDTH), draw(TAPS), draw(DTYPE)
    return (
        Component("conv.x", heads, (width, taps), dtype),
        Component("conv.B", groups, (state, taps), dtype),
        Component("conv.C", groups, (state, taps), dtype),
        Component("ssm", heads, (width, state), draw(DTYPE)),
    )


@st.composite
def delta_rule(draw) -> Components:
    """Gated delta rule with more value heads than key heads; Kimi's has as many of both."""
    key_heads = draw(HEADS)
    value_heads = key_heads * draw(st.sampled_from([1, 2]))
    key, value, taps, dtype = draw(WIDTH), draw(WIDTH), draw(TAPS), draw(DTYPE)
    return (
        Component("conv.q", key_heads, (key, taps), dtype),
        Component("conv.k", key_heads, (key, taps), dtype),
        Component("conv.v", value_heads, (value, taps), dtype),
        Component("state", value_heads, (value, key), draw(DTYPE)),
    )


@st.composite
def short_conv(draw) -> Components:
    return (Component("conv.x", draw(CHANNELS), (draw(TAPS),), draw(DTYPE)),)


@st.composite
def linear_attention(draw) -> Components:
    return (Component("state", draw(HEADS), (draw(WIDTH), draw(WIDTH)), draw(DTYPE)),)


@st.composite
def rg_lru(draw) -> Components:
    """Units are the blocks of its gates."""
    blocks, width = draw(HEADS), draw(WIDTH)
    return (
        Component("conv.x", blocks, (width, draw(TAPS)), draw(DTYPE)),
        Component("state", blocks, (width,), draw(DTYPE)),
    )


KINDS: dict[str, Callable[[], st.SearchStrategy[Components]]] = {
    "attention": attention,
    "latent_attention": latent_attention,
    "mamba1": mamba1,
    "mamba2": mamba2,
    "gated_delta": delta_rule,
    "kimi_delta": delta_rule,
    "short_conv": short_conv,
    "linear_attention": linear_attention,
    "rg_lru": rg_lru,
}
PER_TOKEN = ("attention", "latent_attention")


@st.composite
def models(draw, *, max_layers: int = 3) -> tuple[LayerComponent, ...]:
    """What one to three layers keep; a layer may have attention and another mixer at once."""
    kept: list[LayerComponent] = []
    for layer in range(draw(st.integers(1, max_layers))):
        kinds = [draw(st.sampled_from(sorted(KINDS)))]
        if kinds[0] not in PER_TOKEN and draw(st.booleans()):
            kinds.insert(0, draw(st.sampled_from(PER_TOKEN)))
        for kind in kinds:
            kept += [LayerComponent(layer, kind, item) for item in draw(KINDS[kind]())]
    return tuple(kept)


def fits(kept: tuple[LayerComponent, ...], tp: int) -> bool:
    return all(item.component.units % tp == 0 or tp % item.component.units == 0 for item in kept)
