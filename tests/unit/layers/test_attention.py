import itertools

import pytest
import torch
import torch.nn.functional as F

from tandem.config.model import AttentionConfig, RotaryConfig
from tandem.layers.attention import Attention
from tandem.layers.batch import ForwardBatch
from tests.stepper import ThreadGroup, ThreadRank
from tests.unit.layers.building import HIDDEN, build, context, stored_tensors

NUM_TOKENS, PAGE_TOKENS, NUM_PAGES = 11, 4, 6
PAGES = [5, 0, 2]
X = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def expected(config: AttentionConfig, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    def heads(name: str, count: int) -> torch.Tensor:
        out = F.linear(X, stored[f"{name}_proj.weight"], stored.get(f"{name}_proj.bias"))
        return out.view(NUM_TOKENS, count, config.head_dim).transpose(0, 1)

    q, k = heads("q", config.num_heads), heads("k", config.num_kv_heads)
    v = heads("v", config.num_kv_heads)
    if config.rotary is not None:
        q, k = _rotate(q, config.rotary), _rotate(k, config.rotary)
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=config.scale, enable_gqa=True
    )[0]
    flat = out.transpose(0, 1).flatten(1)
    return F.linear(flat, stored["o_proj.weight"], stored.get("o_proj.bias"))


def _rotate(x: torch.Tensor, rotary: RotaryConfig) -> torch.Tensor:
    half = rotary.rotary_dim // 2
    angles = torch.outer(
        torch.arange(NUM_TOKENS).double(), rotary.theta ** -(torch.arange(half).double() / half)
    )
    turned = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    turned = turned * torch.exp(1j * angles)
    return torch.cat([turned.real.float(), turned.imag.float(), x[..., 2 * half :]], dim=-1)


def batch(kv: torch.Tensor, start: int, stop: int) -> ForwardBatch:
    positions = torch.arange(start, stop)
    return ForwardBatch(
        token_ids=positions,
        positions=positions,
        query_start=torch.tensor([0, stop - start]).int(),
        context_lens=torch.tensor([stop]).int(),
        page_table=torch.tensor([PAGES]).int(),
        slots=torch.zeros(1, dtype=torch.int64),
        has_state=torch.tensor([start > 0]),
        token_pages=torch.tensor(PAGES)[positions // PAGE_TOKENS],
        token_offsets=positions % PAGE_TOKENS,
        num_decode=int(start > 0 and stop - start == 1),
        state={0: {"kv": kv}},
    )


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("rotary", [None, RotaryConfig(4, 100.0), RotaryConfig(8, 1e4)])
def test_ranks_share_heads_over_paged_kv(
    tp: int, num_kv_heads: int, rotary: RotaryConfig | None
) -> None:
    config = AttentionConfig(4, num_kv_heads, 8, 0.3, num_kv_heads == 2, rotary)
    stored = stored_tensors(Attention, config)

    def run(rank: ThreadRank) -> torch.Tensor:
        own = context(rank)
        layer = build(Attention, config, stored, own)
        num_kv = max(1, num_kv_heads // tp)
        kv = torch.full((NUM_PAGES, num_kv, 2, PAGE_TOKENS, config.head_dim), float("nan"))
        edges = [0, 3, 9, 10, NUM_TOKENS]  # chunks, then two decode steps
        return torch.cat(
            [
                layer(X[start:stop], batch(kv, start, stop))
                for start, stop in itertools.pairwise(edges)
            ]
        )

    reference = expected(config, stored)
    for out in ThreadGroup(tp).run(run):
        torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-4)
