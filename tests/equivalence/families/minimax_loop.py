"""MiniMax-Text-01 in its published form, as a plain loop over tokens and heads in float64:
positions turn half of each head, which the model of transformers does otherwise.

It looks to the tests like a model of transformers, and is written from the paper (MiniMax 2025,
arXiv:2501.08313): lightning attention, softmax attention, experts, and what a norm gives going on
along the residual stream.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from tests.equivalence.families.plamo2_loop import silu

Vector = torch.Tensor


def norm(x: Vector, weight: Vector, eps: float) -> Vector:
    return x / (x.square().mean() + eps).sqrt() * weight


class MiniMaxText01:
    """Random weights, the same each time, by the names of the published checkpoints."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name: torch.randn(shape, generator=generator) * (0.2 if len(shape) > 1 else 0.1)
            for name, shape in self._shapes().items()
        }
        for tensor in self.tensors.values():
            if tensor.dim() == 1:  # of norms
                tensor.add_(1.0)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        hidden, width, size = c["hidden_size"], c["head_dim"], c["intermediate_size"]
        heads, kv = c["num_attention_heads"] * width, c["num_key_value_heads"] * width
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (c["vocab_size"], hidden),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (c["vocab_size"], hidden),
        }
        for layer, attends in enumerate(c["attn_type_list"]):
            name = f"model.layers.{layer}."
            leaves: dict[str, tuple[int, ...]] = {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "block_sparse_moe.gate": (c["num_local_experts"], hidden),
            }
            for expert in range(c["num_local_experts"]):
                place = f"block_sparse_moe.experts.{expert}."
                leaves |= {f"{place}w1": (size, hidden), f"{place}w3": (size, hidden)}
                leaves[f"{place}w2"] = (hidden, size)
            if attends:
                leaves |= {"self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv, hidden)}
                leaves |= {"self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, heads)}
            else:
                leaves |= {"self_attn.qkv_proj": (3 * heads, hidden), "self_attn.norm": (heads,)}
                leaves["self_attn.output_gate"] = (heads, hidden)
                leaves["self_attn.out_proj"] = (hidden, heads)
            shapes |= {f"{name}{leaf}.weight": shape for leaf, shape in leaves.items()}
        return shapes

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "model.safetensors")

    def __call__(
        self, ids: torch.Tensor, cache: "Cache | None" = None, **ignored: Any
    ) -> SimpleNamespace:
        cache = cache or Cache(self)
        logits = torch.stack([cache.token(token) for token in ids[0].tolist()])
        return SimpleNamespace(logits=logits[None], cache=cache)

    def generate(self, ids: torch.Tensor, max_new_tokens: int, **ignored: Any) -> torch.Tensor:
        tokens, cache, new = ids[0].tolist(), Cache(self), ids
        for _ in range(max_new_tokens):
            logits = self(new, cache).logits[0, -1]
            tokens.append(int(logits.argmax()))
            new = torch.tensor([tokens[-1:]])
        return torch.tensor([tokens])


class Cache:
    """One sequence: its states, keys and values."""

    def __init__(self, model: MiniMaxText01) -> None:
        self.config = model.config
        self.tensors = {name: value.double() for name, value in model.tensors.items()}
        self.states: dict[tuple[int, int], Vector] = {}
        self.seen: dict[int, list[tuple[Vector, Vector]]] = {}
        self.position = 0

    def token(self, token_id: int) -> Vector:
        c, weights, eps = self.config, self.tensors, self.config["rms_norm_eps"]
        x = weights["model.embed_tokens.weight"][token_id]
        for layer, attends in enumerate(c["attn_type_list"]):
            name = f"model.layers.{layer}."
            kind, mixer = ("full", self.attention) if attends else ("linear", self.lightning)
            x = norm(x, weights[f"{name}input_layernorm.weight"], eps)
            alpha = c[f"layernorm_{kind}_attention_alpha"]
            beta = c[f"layernorm_{kind}_attention_beta"]
            x = alpha * x + beta * mixer(layer, f"{name}self_attn.", x)
            x = norm(x, weights[f"{name}post_attention_layernorm.weight"], eps)
            out = self.experts(f"{name}block_sparse_moe.", x)
            x = c["layernorm_mlp_alpha"] * x + c["layernorm_mlp_beta"] * out
        self.position += 1
        return weights["lm_head.weight"] @ norm(x, weights["model.norm.weight"], eps)

    def lightning(self, layer: int, name: str, x: Vector) -> Vector:
        weights, heads, width = self.tensors, self.config["num_attention_heads"], self._width
        rows = silu(weights[f"{name}qkv_proj.weight"] @ x).view(heads, 3, width)
        last = self.config["num_hidden_layers"] - 1
        out = []
        for head, (q, k, v) in enumerate(rows):
            slope = 2 ** (-8 * (head + 1) / heads) * (1 - layer / (last + 1e-5) + 1e-5)
            decay = torch.tensor(-slope).double().exp()
            state = self.states.get((layer, head), torch.zeros(width, width).double())
            state = decay * state + torch.outer(k, v)
            self.states[layer, head] = state
            out.append(q @ state)
        gate = 1 / (1 + (-(weights[f"{name}output_gate.weight"] @ x)).exp())
        normed = norm(torch.cat(out), weights[f"{name}norm.weight"], 1e-6)
        return weights[f"{name}out_proj.weight"] @ (normed * gate)

    def attention(self, layer: int, name: str, x: Vector) -> Vector:
        weights, width = self.tensors, self._width
        heads, kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = ((weights[f"{name}{letter}_proj.weight"] @ x).view(-1, width) for letter in "qkv")
        seen = self.seen.setdefault(layer, [])
        seen.append((torch.stack([self.turn(item) for item in k]), v))
        out = []
        for head in range(heads):
            group = head // (heads // kv)
            keys = torch.stack([item[0][group] for item in seen])
            values = torch.stack([item[1][group] for item in seen])
            scores = keys @ self.turn(q[head]) / width**0.5
            out.append(scores.softmax(0) @ values)
        return weights[f"{name}o_proj.weight"] @ torch.cat(out)

    def experts(self, name: str, x: Vector) -> Vector:
        weights = self.tensors
        scores = (weights[f"{name}gate.weight"] @ x).softmax(0)
        chosen = scores.topk(self.config["num_experts_per_tok"]).indices.tolist()
        out = torch.zeros_like(x)
        for expert in chosen:
            w1, w2, w3 = (weights[f"{name}experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
            out += scores[expert] / scores[chosen].sum() * (w2 @ (silu(w1 @ x) * (w3 @ x)))
        return out

    def turn(self, x: Vector) -> Vector:
        """Pairs (i, i + r / 2) of the first r channels as complex numbers; the others stay."""
        size = self.config["rotary_dim"]
        half = size // 2
        angles = self.position * self.config["rope_theta"] ** -(torch.arange(half).double() / half)
        turned = torch.complex(x[:half], x[half:size]) * torch.exp(1j * angles)
        return torch.cat([turned.real, turned.imag, x[size:]])

    @property
    def _width(self) -> int:
        return int(self.config["head_dim"])
