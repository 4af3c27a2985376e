import itertools
from typing import Any

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

    q = heads("q", config.num_heads * (2 if config.has_gate else 1))
    k, v = heads("k", config.num_kv_heads), heads("v", config.num_kv_heads)
    gate = torch.tensor(torch.inf)
    if config.has_gate:
        q, gate = q[0::2], q[1::2]
    if config.qk_norm == "head":
        q, k = _norm(q, stored["q_norm.weight"]), _norm(k, stored["k_norm.weight"])
    elif config.qk_norm == "whole":
        q, k = (
            _norm(x.transpose(0, 1).flatten(1), stored[f"{name}_norm.weight"])
            .view(NUM_TOKENS, -1, config.head_dim)
            .transpose(0, 1)
            for name, x in (("q", q), ("k", k))
        )
    if config.rotary is not None:
        q, k = _rotate(q, config.rotary), _rotate(k, config.rotary)
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=config.scale, enable_gqa=True
    )[0]
    flat = (out * gate.sigmoid()).transpose(0, 1).flatten(1)
    return F.linear(flat, stored["o_proj.weight"], stored.get("o_proj.bias"))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


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
@pytest.mark.parametrize(
    ("rotary", "options"),
    [
        (None, {}),
        (RotaryConfig(4, 100.0), {"has_out_bias": True}),
        (RotaryConfig(8, 1e4), {"qk_norm": "head", "has_gate": True}),
        (None, {"qk_norm": "whole", "has_out_bias": False}),
    ],
    ids=str,
)
def test_ranks_share_heads_over_paged_kv(
    tp: int, num_kv_heads: int, rotary: RotaryConfig | None, options: dict[str, Any]
) -> None:
    config = AttentionConfig(4, num_kv_heads, 8, 0.3, num_kv_heads == 2, rotary, **options)
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
