"""A small Nemotron-H in plain torch, for training the demo model.

Module names are those of the HF checkpoint (`backbone.layers.N.mixer.in_proj.weight`), so
`state_dict` is the checkpoint. Whole rows only: no cache, no serving. The recurrence is
the project's reference scan.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tandem.ops.ssd.reference import ssd_scan

CONFIG = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 256,
    "hybrid_override_pattern": "M-M-M*-M-M*-M-M-",
    "num_hidden_layers": 16,
    "intermediate_size": 1280,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "n_groups": 2,
    "ssm_state_size": 64,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "chunk_size": 128,
    # transformers (5.24) clamps the step size from below at time_step_min in prefill but not in
    # decode; this small, the clamp changes nothing and the two agree.
    "time_step_min": 1e-9,
    "time_step_max": 0.1,
    "time_step_floor": 1e-9,
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "mamba_ssm_cache_dtype": "float32",
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": True,
}


class RMSNorm(nn.Module):
    """RMS norm over groups of the last dimension; fp32 inside."""

    def __init__(self, width: int, eps: float, num_groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.num_groups = num_groups

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        y = x.float()
        if gate is not None:
            y = y * F.silu(gate.float())
        grouped = y.unflatten(-1, (self.num_groups, -1))
        grouped = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.eps)
        return (grouped.flatten(-2) * self.weight.float()).to(x.dtype)


@torch.compiler.disable  # the scan reads its row bounds on the host
def scan_rows(x, dt, A, B, C, D, num_rows: int, chunk: int) -> torch.Tensor:
    """`ssd_scan` over `num_rows` fresh rows of equal length; fp32 under autocast too."""
    state = dt.new_zeros(num_rows, *x.shape[1:], B.shape[-1])
    bounds = torch.arange(num_rows + 1, dtype=torch.int32) * (x.shape[0] // num_rows)
    with torch.autocast(x.device.type, enabled=False):
        return ssd_scan(x, dt, A, B, C, D, state, bounds, chunk=chunk)[0]


class Mamba2Mixer(nn.Module):
    """Mamba-2 (Dao & Gu 2024, arXiv:2405.21060)."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, heads = config["hidden_size"], config["mamba_num_heads"]
        self.num_heads, self.head_dim = heads, config["mamba_head_dim"]
        self.num_groups, self.state_size = config["n_groups"], config["ssm_state_size"]
        self.chunk = config["chunk_size"]
        inner = heads * self.head_dim
        channels = inner + 2 * self.num_groups * self.state_size
        self.sizes = [inner, channels, heads]
        self.conv_kernel = config["conv_kernel"]
        self.in_proj = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.conv1d = nn.Conv1d(channels, channels, self.conv_kernel, groups=channels)
        self.norm = RMSNorm(inner, config["layer_norm_epsilon"], self.num_groups)
        self.out_proj = nn.Linear(inner, hidden, bias=False)
        self.D = nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.log(torch.linspace(1, 16, heads)))
        # Step sizes start log-uniform in [1e-3, 0.1]; the bias is the inverse of softplus.
        step = torch.exp(torch.rand(heads) * math.log(100) + math.log(1e-3))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        z, mixed, dt = self.in_proj(x).split(self.sizes, dim=-1)
        # Depthwise conv as a sum of shifted rows: elementwise work, which compiles into one kernel.
        taps = self.conv1d.weight[:, 0].to(mixed.dtype)  # [C, W]
        padded = F.pad(mixed, (0, 0, self.conv_kernel - 1, 0))
        mixed = sum(padded[:, i : i + length] * taps[:, i] for i in range(self.conv_kernel))
        mixed = F.silu(mixed + self.conv1d.bias.to(mixed.dtype))
        bc = self.num_groups * self.state_size
        values, b, c = mixed.flatten(0, 1).split([self.sizes[0], bc, bc], dim=-1)
        y = scan_rows(
            values.unflatten(-1, (self.num_heads, self.head_dim)),
            F.softplus(dt.flatten(0, 1).float() + self.dt_bias.float()),
            -torch.exp(self.A_log.float()),
            b.unflatten(-1, (self.num_groups, self.state_size)),
            c.unflatten(-1, (self.num_groups, self.state_size)),
            self.D.float(),
            rows,
            self.chunk,
        )
        return self.out_proj(self.norm(y.view(rows, length, -1), z).to(x.dtype))


class AttentionMixer(nn.Module):
    """Causal attention without positions, grouped KV heads."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, self.head_dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class MlpMixer(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config["hidden_size"], config["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(config["intermediate_size"], config["hidden_size"], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


class Block(nn.Module):
    def __init__(self, config: dict, letter: str, dropout: float) -> None:
        super().__init__()
        self.norm = RMSNorm(config["hidden_size"], config["layer_norm_epsilon"])
        self.mixer = {"M": Mamba2Mixer, "*": AttentionMixer, "-": MlpMixer}[letter](config)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.mixer(self.norm(x)), self.dropout, self.training)


class Backbone(nn.Module):
    def __init__(self, config: dict, dropout: float) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(
            Block(config, letter, dropout) for letter in config["hybrid_override_pattern"]
        )
        self.norm_f = RMSNorm(config["hidden_size"], config["layer_norm_epsilon"])


class DemoModel(nn.Module):
    """tokens int64 [rows, length] -> logits [rows, length, vocab_size]."""

    def __init__(self, config: dict = CONFIG, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.dropout = dropout
        self.backbone = Backbone(config, dropout)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        depth = len(config["hybrid_override_pattern"])
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # What writes to the residual stream starts smaller by the root of the depth.
                writes = name.endswith(("out_proj", "o_proj", "down_proj"))
                std = module.weight.shape[-1] ** -0.5 if isinstance(module, nn.Linear) else 0.5
                nn.init.normal_(module.weight, std=std / math.sqrt(depth) if writes else std)
        nn.init.normal_(self.lm_head.weight, std=0.5 * config["hidden_size"] ** -0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.backbone.embeddings(tokens), self.dropout, self.training)
        for layer in self.backbone.layers:
            x = layer(x)
        return self.lm_head(self.backbone.norm_f(x))
