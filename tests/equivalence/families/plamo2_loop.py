"""PLaMo-2 as a plain loop over tokens and heads in float64: nobody else's code is its oracle.

It looks to the tests like a model of transformers, and is written from the equations of the
published model: Mamba-2's recurrence (Dao & Gu 2024, arXiv:2405.21060) with parameters of few
channels, windowed attention with normed heads (Su et al. 2021, arXiv:2104.09864), norms stored
around zero on both sides of each part.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

Vector = torch.Tensor


def norm(x: Vector, weight: Vector, offset: float = 0.0) -> Vector:
    return x / (x.square().mean() + 1e-6).sqrt() * (weight + offset)


def silu(x: Vector) -> Vector:
    return x / (1 + (-x).exp())


class Plamo2:
    """Random weights, the same each time, by the names of the published checkpoints."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name: torch.randn(shape, generator=generator) * (0.2 if len(shape) > 1 else 0.1)
            for name, shape in self._shapes().items()
        }
        for name, tensor in self.tensors.items():
            if name.endswith("dt_bias"):  # steps from about 0.01 to 1
                tensor.uniform_(-4, 0.5, generator=generator)
            elif name.endswith(("A_log", "D", "q_weight", "k_weight")) or "_norm_weight" in name:
                tensor.add_(1.0)

    def attends(self, layer: int) -> bool:
        return layer % self.config["mamba_step"] == self.config["mamba_step"] // 2

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        hidden, width = c["hidden_size"], c["hidden_size_per_head"]
        shapes = {
            "model.embed_tokens.weight": (c["vocab_size"], hidden),
            "model.norm.weight": (hidden,),
            "lm_head.weight": (c["vocab_size"], hidden),
        }
        heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
        mamba, state = c["mamba_num_heads"], c["mamba_d_state"]
        rank, inner = max(64, hidden // 16), mamba * width
        for layer in range(c["num_hidden_layers"]):
            name = f"model.layers.layers.{layer}."
            for place in ("pre_mixer", "post_mixer", "pre_mlp", "post_mlp"):
                shapes[f"{name}{place}_norm.weight"] = (hidden,)
            shapes[f"{name}mlp.gate_up_proj.weight"] = (2 * c["intermediate_size"], hidden)
            shapes[f"{name}mlp.down_proj.weight"] = (hidden, c["intermediate_size"])
            if self.attends(layer):
                mixer: dict[str, tuple[int, ...]] = {
                    "qkv_proj.weight": ((heads + 2 * kv) * width, hidden),
                    "q_weight": (heads, width),
                    "k_weight": (kv, width),
                    "o_proj.weight": (hidden, heads * width),
                }
            else:
                mixer = {
                    "in_proj.weight": (2 * inner, hidden),
                    "conv1d.weight": (inner, 1, c["mamba_d_conv"]),
                    "bcdt_proj.weight": (2 * state + rank, inner),
                    "dt_proj.weight": (mamba, rank),
                    "dt_bias": (mamba,),
                    "A_log": (mamba,),
                    "D": (mamba,),
                    "B_norm_weight": (state,),
                    "C_norm_weight": (state,),
                    "dt_norm_weight": (rank,),
                    "out_proj.weight": (hidden, inner),
                }
            shapes |= {f"{name}mixer.{leaf}": shape for leaf, shape in mixer.items()}
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
    """One sequence: its windows, states, keys and values."""

    def __init__(self, model: Plamo2) -> None:
        self.model = model
        self.tensors = {name: value.double() for name, value in model.tensors.items()}
        self.windows: dict[int, list[Vector]] = {}
        self.states: dict[int, list[Vector]] = {}
        self.seen: dict[int, list[tuple[Vector, Vector]]] = {}
        self.position = 0

    def token(self, token_id: int) -> Vector:
        weights = self.tensors
        x = weights["model.embed_tokens.weight"][token_id]
        for layer in range(self.model.config["num_hidden_layers"]):
            name = f"model.layers.layers.{layer}."
            mixer = self.attention if self.model.attends(layer) else self.mamba
            inner = norm(x, weights[f"{name}pre_mixer_norm.weight"], 1.0)
            mixed = mixer(layer, f"{name}mixer.", inner)
            x = x + norm(mixed, weights[f"{name}post_mixer_norm.weight"], 1 / 5)
            inner = norm(x, weights[f"{name}pre_mlp_norm.weight"], 1.0)
            gate, up = (weights[f"{name}mlp.gate_up_proj.weight"] @ inner).chunk(2)
            mixed = weights[f"{name}mlp.down_proj.weight"] @ (silu(gate) * up)
            x = x + norm(mixed, weights[f"{name}post_mlp_norm.weight"], 1 / 5**1.5)
        self.position += 1
        return weights["lm_head.weight"] @ norm(x, weights["model.norm.weight"], 1.0)

    def mamba(self, layer: int, name: str, x: Vector) -> Vector:
        weights, config = self.tensors, self.model.config
        heads, width = config["mamba_num_heads"], config["hidden_size_per_head"]
        projected = (weights[f"{name}in_proj.weight"] @ x).view(heads, 2, width)
        gate, raw = projected[:, 0].flatten(), projected[:, 1].flatten()
        taps = weights[f"{name}conv1d.weight"][:, 0]
        num_taps = taps.shape[1]
        window = self.windows.setdefault(layer, [torch.zeros(len(raw)).double()] * num_taps)
        window.append(raw)
        del window[0]
        convolved = silu(torch.stack([taps[:, i] * window[i] for i in range(num_taps)]).sum(0))
        low, size = weights[f"{name}bcdt_proj.weight"] @ convolved, config["mamba_d_state"]
        B = norm(low[:size], weights[f"{name}B_norm_weight"])
        C = norm(low[size : 2 * size], weights[f"{name}C_norm_weight"])
        dt = norm(low[2 * size :], weights[f"{name}dt_norm_weight"])
        dt = weights[f"{name}dt_proj.weight"] @ dt + weights[f"{name}dt_bias"]
        dt = (1 + dt.exp()).log()
        states = self.states.setdefault(layer, [torch.zeros(width, size).double()] * heads)
        out = []
        for head in range(heads):
            values = convolved[head * width : (head + 1) * width]
            decay = (-weights[f"{name}A_log"][head].exp() * dt[head]).exp()
            states[head] = decay * states[head] + dt[head] * torch.outer(values, B)
            out.append(states[head] @ C + weights[f"{name}D"][head] * values)
        return weights[f"{name}out_proj.weight"] @ (torch.cat(out) * silu(gate))

    def attention(self, layer: int, name: str, x: Vector) -> Vector:
        weights, config = self.tensors, self.model.config
        heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
        width = config["hidden_size_per_head"]
        rows = (weights[f"{name}qkv_proj.weight"] @ x).view(-1, width)
        q = [norm(rows[i], weights[f"{name}q_weight"][i]) for i in range(heads)]
        k = [norm(rows[heads + i], weights[f"{name}k_weight"][i]) for i in range(kv)]
        seen = self.seen.setdefault(layer, [])
        seen.append((torch.stack([self.turn(item) for item in k]), rows[heads + kv :]))
        del seen[: -(config["attention_window_size"] + 1)]
        out = []
        for head in range(heads):
            group = head // (heads // kv)
            keys = torch.stack([item[0][group] for item in seen])
            values = torch.stack([item[1][group] for item in seen])
            scores = keys @ self.turn(q[head]) / width**0.5
            out.append(scores.softmax(0) @ values)
        return weights[f"{name}o_proj.weight"] @ torch.cat(out)

    def turn(self, x: Vector) -> Vector:
        """Pairs (i, i + d / 2) as complex numbers."""
        half = len(x) // 2
        angles = self.position * 10000.0 ** -(torch.arange(half).double() / half)
        turned = torch.complex(x[:half], x[half:]) * torch.exp(1j * angles)
        return torch.cat([turned.real, turned.imag])
