"""The models as a loop over tokens in float64: the slowest and plainest reading of their papers.

Independent of tandem and of transformers' forward passes; it takes the tensors and config of a
transformers model, for Nemotron-H and Bamba.
"""

from typing import Any

import torch

Vector = torch.Tensor  # float64


def _norm(x: Vector, weight: Vector, eps: float) -> Vector:
    return x / (x.square().mean() + eps).sqrt() * weight


def _silu(x: Vector) -> Vector:
    return x / (1 + (-x).exp())


class TokenLoop:
    """One sequence; `token(id)` returns the logits after it."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.tensors = {name: value.double() for name, value in model.state_dict().items()}
        self.is_bamba = model.config.model_type == "bamba"
        config = self.config
        self.eps = config.rms_norm_eps if self.is_bamba else config.layer_norm_epsilon
        self.groups = config.mamba_n_groups if self.is_bamba else config.n_groups
        self.kinds = list(config.layers_block_type)
        self.position = 0
        self.window: dict[int, list[Vector]] = {}
        self.state: dict[int, list[Vector]] = {}
        self.keys: dict[int, list[Vector]] = {}
        self.values: dict[int, list[Vector]] = {}

    def tokens(self, token_ids: list[int]) -> torch.Tensor:
        return torch.stack([self.token(token_id) for token_id in token_ids])

    def token(self, token_id: int) -> Vector:
        embedding, norm = (
            ("embed_tokens", "final_layernorm") if self.is_bamba else ("embeddings", "norm_f")
        )
        x = self.tensors[f"model.{embedding}.weight"][token_id]
        for index, kind in enumerate(self.kinds):
            layer = f"model.layers.{index}."
            if not self.is_bamba:
                inner = _norm(x, self.tensors[f"{layer}norm.weight"], self.eps)
                x = x + self._part(kind, f"{layer}mixer.", index, inner)
                continue
            name = "mamba" if kind == "linear_attention" else "self_attn"
            inner = _norm(x, self.tensors[f"{layer}input_layernorm.weight"], self.eps)
            x = x + self._part(kind, f"{layer}{name}.", index, inner)
            inner = _norm(x, self.tensors[f"{layer}pre_ff_layernorm.weight"], self.eps)
            gate = self._linear(f"{layer}feed_forward.gate_proj", inner)
            up = self._linear(f"{layer}feed_forward.up_proj", inner)
            x = x + self._linear(f"{layer}feed_forward.down_proj", _silu(gate) * up)
        self.position += 1
        return self.tensors["lm_head.weight"] @ _norm(
            x, self.tensors[f"model.{norm}.weight"], self.eps
        )

    def _linear(self, name: str, x: Vector) -> Vector:
        y = self.tensors[f"{name}.weight"] @ x
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _part(self, kind: str, name: str, index: int, x: Vector) -> Vector:
        if kind == "linear_attention":
            return self._mamba(name, index, x)
        if kind == "full_attention":
            return self._attention(name, index, x)
        return self._relu2(name, x) if kind == "mlp" else self._experts(name, x)

    def _relu2(self, name: str, x: Vector) -> Vector:
        return self._linear(f"{name}down_proj", self._linear(f"{name}up_proj", x).clamp(min=0) ** 2)

    def _mamba(self, name: str, index: int, x: Vector) -> Vector:
        tensors, groups = self.tensors, self.groups
        num_heads = len(tensors[f"{name}D"])
        inner = len(tensors[f"{name}norm.weight"])
        head_dim = inner // num_heads
        taps = tensors[f"{name}conv1d.weight"][:, 0]
        conv_size, num_taps = taps.shape
        state_size = (conv_size - inner) // (2 * groups)
        projected = self._linear(f"{name}in_proj", x)
        z, raw = projected[:inner], projected[inner : inner + conv_size]
        dt = projected[inner + conv_size :] + tensors[f"{name}dt_bias"]
        dt = (1 + dt.exp()).log()
        window = self.window.setdefault(index, [torch.zeros(conv_size).double()] * num_taps)
        window.append(raw)
        del window[0]
        mixed = sum((taps[:, i] * window[i] for i in range(num_taps)), torch.zeros(1).double())
        if f"{name}conv1d.bias" in tensors:
            mixed = mixed + tensors[f"{name}conv1d.bias"]
        mixed = _silu(mixed)
        B = mixed[inner : inner + groups * state_size].view(groups, state_size)
        C = mixed[inner + groups * state_size :].view(groups, state_size)
        states = self.state.setdefault(
            index, [torch.zeros(head_dim, state_size).double() for _ in range(num_heads)]
        )
        out = torch.empty(inner).double()
        for head in range(num_heads):
            values = mixed[head * head_dim : (head + 1) * head_dim]
            group = head // (num_heads // groups)
            decay = (-tensors[f"{name}A_log"][head].exp() * dt[head]).exp()
            states[head] = decay * states[head] + dt[head] * torch.outer(values, B[group])
            y = states[head] @ C[group] + tensors[f"{name}D"][head] * values
            out[head * head_dim : (head + 1) * head_dim] = y
        gated = out * _silu(z)
        weight = tensors[f"{name}norm.weight"]
        parts = [
            _norm(part, part_weight, self.eps)
            for part, part_weight in zip(gated.chunk(groups), weight.chunk(groups), strict=True)
        ]
        return self._linear(f"{name}out_proj", torch.cat(parts))

    def _attention(self, name: str, index: int, x: Vector) -> Vector:
        num_heads, num_kv = self.config.num_attention_heads, self.config.num_key_value_heads
        q = self._linear(f"{name}q_proj", x).view(num_heads, -1)
        k = self._linear(f"{name}k_proj", x).view(num_kv, -1)
        v = self._linear(f"{name}v_proj", x).view(num_kv, -1)
        if self.is_bamba:
            q, k = self._rotate(q), self._rotate(k)
        self.keys.setdefault(index, []).append(k)
        self.values.setdefault(index, []).append(v)
        out = []
        for head in range(num_heads):
            kv = head // (num_heads // num_kv)
            keys = torch.stack([item[kv] for item in self.keys[index]])
            values = torch.stack([item[kv] for item in self.values[index]])
            scores = (keys @ q[head] / q.shape[1] ** 0.5).softmax(0)
            out.append(scores @ values)
        return self._linear(f"{name}o_proj", torch.cat(out))

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Pairs (i, i + d / 2) of the first half of each head, as complex numbers."""
        size = x.shape[1] // 2
        theta = float(self.config.rope_parameters["rope_theta"])
        angles = self.position * theta ** (-torch.arange(0, size, 2).double() / size)
        turned = torch.complex(x[:, : size // 2], x[:, size // 2 : size]) * torch.exp(1j * angles)
        return torch.cat([turned.real, turned.imag, x[:, size:]], dim=1)

    def _experts(self, name: str, x: Vector) -> Vector:
        config, tensors = self.config, self.tensors
        scores = 1 / (1 + (-(tensors[f"{name}gate.weight"] @ x)).exp())
        corrected = (scores + tensors[f"{name}gate.e_score_correction_bias"]).tolist()
        group_size = len(corrected) // config.n_group
        ranked = sorted(
            range(config.n_group),
            key=lambda g: -sum(sorted(corrected[g * group_size : (g + 1) * group_size])[-2:]),
        )
        allowed = [
            expert
            for expert in range(len(corrected))
            if expert // group_size in ranked[: config.topk_group]
        ]
        chosen = sorted(allowed, key=lambda e: -corrected[e])[: config.num_experts_per_tok]
        total = sum(scores[expert] for expert in chosen) if config.norm_topk_prob else 1.0
        inner = x
        if config.moe_latent_size is not None:
            inner = self._linear(f"{name}fc1_latent_proj", x)
        out = torch.zeros_like(inner)
        for expert in chosen:
            hidden = (tensors[f"{name}experts.up_proj"][expert] @ inner).clamp(min=0) ** 2
            weight = scores[expert] / total * config.routed_scaling_factor
            out = out + weight * (tensors[f"{name}experts.down_proj"][expert] @ hidden)
        if config.moe_latent_size is not None:
            out = self._linear(f"{name}fc2_latent_proj", out)
        return out + self._relu2(f"{name}shared_experts.", x)
