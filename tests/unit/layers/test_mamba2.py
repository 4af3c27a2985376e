"""The layer alone; its equality with other implementations is tested in tests/equivalence."""

import itertools
from dataclasses import replace

import pytest
import torch

from tandem.config.model import Mamba2Config
from tandem.layers.batch import ForwardBatch
from tandem.layers.mamba2 import Mamba2
from tests.unit.layers.building import HIDDEN, build, context, stored_tensors

CONFIG = Mamba2Config(
    num_heads=4,
    head_dim=8,
    num_groups=2,
    state_size=4,
    conv_kernel=4,
    has_conv_bias=True,
    has_proj_bias=False,
    dt_limit=(0.0, float("inf")),
    chunk_size=16,
    norm_eps=1e-5,
)
NUM_SLOTS = 5
# Components of a slot and their place in it, as an arena lays them out.
SHAPES = {"conv.x": (4, 8, 3), "conv.B": (2, 4, 3), "conv.C": (2, 4, 3), "ssm": (4, 8, 4)}


def arena() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """NaN everywhere; views that are strided over slots."""
    width = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    buffer = torch.full((NUM_SLOTS, width), float("nan"))
    parts = buffer.split([torch.Size(shape).numel() for shape in SHAPES.values()], dim=1)
    return buffer, {
        name: part.view(NUM_SLOTS, *shape)
        for (name, shape), part in zip(SHAPES.items(), parts, strict=True)
    }


def batch(
    state: dict[str, torch.Tensor], slots: list[int], lengths: list[int], has_state: list[bool]
) -> ForwardBatch:
    num_tokens = sum(lengths)
    zeros = torch.zeros(num_tokens, dtype=torch.int64)
    return ForwardBatch(
        token_ids=zeros,
        positions=zeros,
        query_start=torch.tensor([0, *lengths]).cumsum(0).int(),
        context_lens=torch.tensor(lengths).int(),
        page_table=torch.zeros(len(slots), 1).int(),
        slots=torch.tensor(slots),
        has_state=torch.tensor(has_state),
        token_pages=zeros,
        token_offsets=zeros,
        num_decode=sum(n == 1 and known for n, known in zip(lengths, has_state, strict=True)),
        state={0: state},
    )


def run(config: Mamba2Config, x: torch.Tensor, *cuts: int) -> torch.Tensor:
    """One sequence in slot 3, cut before the given tokens."""
    layer = build(Mamba2, config, stored_tensors(Mamba2, config), context())
    _, state = arena()
    edges = [0, *cuts, len(x)]
    return torch.cat(
        [
            layer(x[start:stop], batch(state, [3], [stop - start], [start > 0]))
            for start, stop in itertools.pairwise(edges)
        ]
    )


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("cuts", [(1,), (2, 3, 4), (19,), (16,), tuple(range(1, 20))])
def test_any_cut_gives_the_whole(x: torch.Tensor, cuts: tuple[int, ...]) -> None:
    torch.testing.assert_close(run(CONFIG, x, *cuts), run(CONFIG, x))


@pytest.mark.parametrize("limit", [(0.5, 0.6), (0.0, 0.3), (0.9, float("inf"))])
def test_step_limit_holds_in_prefill_and_decode(x: torch.Tensor, limit) -> None:
    limited = replace(CONFIG, dt_limit=limit)
    decoded = run(limited, x, *range(1, 20))
    torch.testing.assert_close(decoded, run(limited, x))
    assert (decoded - run(CONFIG, x)).abs().max() > 1e-2


def test_mixed_batch_touches_only_its_slots_and_rows_do_not_mix(x: torch.Tensor) -> None:
    layer = build(Mamba2, CONFIG, stored_tensors(Mamba2, CONFIG), context())
    buffer, state = arena()
    layer(x[:9], batch(state, [4, 0], [5, 4], [False, False]))
    before = buffer.clone()
    mixed = layer(
        torch.cat([x[5:6], x[9:12], x[:1]]), batch(state, [4, 0, 2], [1, 3, 1], [True, True, False])
    )
    torch.testing.assert_close(mixed[:1], run(CONFIG, x, 5)[5:6])
    torch.testing.assert_close(mixed[1:4], run(CONFIG, x[5:12], 4)[4:])
    torch.testing.assert_close(mixed[4:], run(CONFIG, x)[:1])
    assert buffer[[1, 3]].isnan().all()
    assert not buffer[[0, 2, 4]].isnan().any()
    assert not torch.equal(buffer[[0, 4]], before[[0, 4]])
