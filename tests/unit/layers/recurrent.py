"""What every recurrent layer has to hold, for tests of one layer alone: any cut of a sequence gives
the whole, rows of a batch do not mix, ranks sum to the whole, and transformers computes the same.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tandem.layers.batch import ForwardBatch
from tandem.state.kinds import components_of
from tandem.state.spec import owned
from tests.stepper import ThreadGroup
from tests.unit.layers.building import HIDDEN, build, context, stored_tensors

NUM_SLOTS = 5
Stored = dict[str, torch.Tensor]


class SlotArena:
    """NaN everywhere; views of one rank's components that are strided over slots."""

    def __init__(self, config: Any, tp: int = 1, rank: int = 0) -> None:
        shapes = {
            item.name: (len(owned(item.units, tp, rank)), *item.unit_shape)
            for item in components_of(config, "float32", "float32")
        }
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        self.buffer = torch.full((NUM_SLOTS, sum(sizes)), torch.nan)
        parts = self.buffer.split(sizes, dim=1)
        self.state = {
            name: part.unflatten(1, shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }


def batch_of(
    state: Mapping[str, torch.Tensor],
    slots: Sequence[int],
    lengths: Sequence[int],
    has_state: Sequence[bool],
) -> ForwardBatch:
    """Rows of one token that have a state come first and decode."""
    zeros = torch.zeros(sum(lengths), dtype=torch.int64)
    is_decode = [n == 1 and known for n, known in zip(lengths, has_state, strict=True)]
    num_decode = is_decode.index(False) if False in is_decode else len(is_decode)
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
        num_decode=num_decode,
        state={0: state},
    )


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def run_cut(layer: Any, arena: SlotArena, x: torch.Tensor, cuts: Sequence[int]) -> torch.Tensor:
    """One sequence in slot 3, cut before the given tokens."""
    edges = [0, *cuts, len(x)]
    outputs = [
        layer(x[start:stop], batch_of(arena.state, [3], [stop - start], [start > 0]))
        for start, stop in itertools.pairwise(edges)
    ]
    return torch.cat(outputs)


def check_cuts(layer_type: Any, config: Any, x: torch.Tensor, *all_cuts: Sequence[int]) -> None:
    layer = build(layer_type, config, stored_tensors(layer_type, config), context())
    whole_arena = SlotArena(config)
    whole = run_cut(layer, whole_arena, x, ())
    assert not whole.isnan().any()
    for cuts in all_cuts:
        arena = SlotArena(config)
        torch.testing.assert_close(run_cut(layer, arena, x, cuts), whole)
        torch.testing.assert_close(arena.buffer[3], whole_arena.buffer[3])
        assert arena.buffer[[0, 1, 2, 4]].isnan().all()


def check_mixed_batch(layer_type: Any, config: Any) -> None:
    """Decode, a continued prompt, an empty row and a fresh prompt at once equal each alone."""
    layer = build(layer_type, config, stored_tensors(layer_type, config), context())
    x, y, z = (tokens(12, seed) for seed in (1, 2, 3))
    arena = SlotArena(config)
    layer(torch.cat([x[:5], y[:4]]), batch_of(arena.state, [4, 0], [5, 4], [False, False]))
    before = arena.buffer.clone()
    mixed = layer(
        torch.cat([x[5:6], y[4:7], z[:2]]),
        batch_of(arena.state, [4, 0, 1, 2], [1, 3, 0, 2], [True, True, False, False]),
    )
    alone = [run_cut(layer, SlotArena(config), item, ()) for item in (x, y, z)]
    expected = torch.cat([alone[0][5:6], alone[1][4:7], alone[2][:2]])
    torch.testing.assert_close(mixed, expected)
    assert arena.buffer[[1, 3]].isnan().all()
    assert not arena.buffer[[0, 2, 4]].isnan().any()
    assert not torch.equal(arena.buffer[[0, 4]], before[[0, 4]])


def check_ranks(layer_type: Any, config: Any, tp: int) -> None:
    """Each rank returns the whole layer's output and keeps its units of the whole state."""
    stored, x = stored_tensors(layer_type, config), tokens(11)
    whole = SlotArena(config)
    expected = run_cut(build(layer_type, config, stored, context()), whole, x, (9, 10))
    arenas = [SlotArena(config, tp, rank) for rank in range(tp)]
    outputs = ThreadGroup(tp).run(
        lambda rank: run_cut(
            build(layer_type, config, stored, context(rank)), arenas[rank.rank], x, (9, 10)
        )
    )
    for rank, (output, arena) in enumerate(zip(outputs, arenas, strict=True)):
        torch.testing.assert_close(output, expected)
        for item in components_of(config, "float32", "float32"):
            units = owned(item.units, tp, rank)
            mine = whole.state[item.name][3, units.start : units.stop]
            torch.testing.assert_close(arena.state[item.name][3], mine)


def randomise(module: torch.nn.Module, std: float = 0.3, seed: int = 0) -> torch.nn.Module:
    """Every parameter drawn anew: a swapped or skipped one shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return module.eval()


def check_against(
    oracle: list[torch.Tensor],
    layer_type: Any,
    config: Any,
    stored: Stored,
    x: torch.Tensor,
    cuts: Sequence[int],
) -> None:
    """`oracle`: its outputs [tokens, hidden], joined, for all of x."""
    layer = build(layer_type, config, stored, context())
    declared = {
        piece.name: piece.shape
        for weight in layer_type.weights(config, context()).values()
        for piece in weight.pieces
    }
    assert declared == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    with torch.no_grad():
        found = run_cut(layer, SlotArena(config), x, cuts)
    expected = torch.cat(oracle)
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5 * max(1.0, scale))
