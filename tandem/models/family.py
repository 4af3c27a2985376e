"""What a family declares: how its config.json is read, and how its tensors are named. No torch.

Layers declare tensors by names of their own; a family says where a checkpoint keeps them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.config.keys import Keys
from tandem.config.model import FeedForwardConfig, MixerConfig, ModelConfig


@dataclass(frozen=True)
class Stored:
    """Where a checkpoint keeps a tensor that a layer declares.

    run, num_runs: it is one of several equal runs of rows of the tensor `name`. sizes: of the
        runs, where they are not equal.
    is_stacked: it is one entry of a tensor with a further first axis, at the number that the `*`
        of its own name stands for.
    """

    name: str
    run: int = 0
    num_runs: int = 1
    is_stacked: bool = False
    sizes: tuple[int, ...] = ()


# A layer's name, or what it begins with up to a dot; `*` stands for one number → the checkpoint's.
# In a plain string `*` is that number again.
Names = Mapping[str, str | Stored]
# A checkpoint's factor on a tensor that a layer declares, or one on each interval of its rows.
Scales = Mapping[str, float | Sequence[float]]


@dataclass(frozen=True)
class Branch:
    """A mixer or a feed-forward, and where its tensors lie.

    `prefix` stands before each name below the family's own prefix. `names`: what the family calls
    otherwise. `scales`: constants folded into the weights, by the layer's names.
    """

    prefix: str
    config: MixerConfig | FeedForwardConfig
    names: Names = field(default_factory=dict)
    scales: Scales = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One step along the residual stream: `x + post_norm(sum of branches(norm(x)))`.

    `layer` is the index in the model's config; norms are checkpoint names below the family's own
    prefix, None where there is none. `post_norm_offset`: None for the model's.
    `residual_scale`: not x but norm(x), times this, goes on.
    `sees_embedded`: its branches get the embedded tokens too.
    """

    layer: int
    branches: tuple[Branch, ...]
    norm: str | None
    post_norm: str | None = None
    post_norm_offset: float | None = None
    residual_scale: float | None = None
    sees_embedded: bool = False


def pre_normed(
    layer: int,
    mixers: Sequence[Branch],
    feed_forwards: Sequence[Branch],
    *,
    mixer_norm: str = "input_layernorm",
    feed_forward_norm: str = "post_attention_layernorm",
) -> list[Part]:
    """The two parts of the most common layer, `layers.N`: norm and mixers, norm and feed-forwards.

    Without a feed-forward there is no second part.
    """
    name = f"layers.{layer}"
    parts = [Part(layer, tuple(mixers), f"{name}.{mixer_norm}.weight")]
    if feed_forwards:
        parts.append(Part(layer, tuple(feed_forwards), f"{name}.{feed_forward_norm}.weight"))
    return parts


@dataclass(frozen=True)
class Family:
    """Everything that only one family says.

    `kinds`: of its mixers and feed-forwards, for people who look for a model. `oracle`: what tests
    hold it to. `tested_tp`: sizes of tensor parallelism that they try.
    `title`: how people call it. `read`: config.json → the model. `parts`: of the model, with the
    names of the usual checkpoints; `other_parts`: with those of others, tried in order.
    `prefixes`: what stands before every name but the head's; the first that a checkpoint uses.
    `ignored`: patterns (re.search) of tensors that a checkpoint may hold and serving does not need.
    """

    title: str
    read: Callable[[Keys], ModelConfig]
    parts: Callable[[ModelConfig], list[Part]]
    kinds: tuple[str, ...]
    prefixes: tuple[str, ...]
    embedding: str
    final_norm: str
    head: str = "lm_head.weight"
    ignored: tuple[str, ...] = ()
    other_parts: tuple[Callable[[ModelConfig], list[Part]], ...] = ()
    oracle: str = "transformers"
    tested_tp: tuple[int, ...] = (1, 2, 4)
