"""The Qwen3 architecture for training: parameters are named as in transformers, attention knows packed rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

# Queries, keys and values of one layer in, mixed values out; shapes (B, heads, L, head size).
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of the shipped model; `positions` is what it accepts, not what it was trained on."""

    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    inner: int = 768
    positions: int = 32768
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class SelfAttention(nn.Module):
    """Grouped-query attention with normalized queries and keys and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_size, shape.norm_eps)
        self.k_norm = Norm(shape.head_size, shape.norm_eps)

    def forward(self, x_bld: Tensor, cos: Tensor, sin: Tensor, attend: Attention) -> Tensor:
        rows, length, _ = x_bld.shape
        split = (rows, length, -1, self.head_size)
        q = self.q_norm(self.q_proj(x_bld).view(split)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x_bld).view(split)).transpose(1, 2)
        v = self.v_proj(x_bld).view(split).transpose(1, 2)
        mixed = attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out


class Gated(nn.Module):
    """The SwiGLU feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention, then feed-forward, each on a normalized residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = SelfAttention(shape)
        self.mlp = Gated(shape)
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)


class TinyQwen3(nn.Module):
    """The whole model, embeddings tied."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)

    def forward(self, ids_bl: Tensor, attend: Attention) -> Tensor:
        """Logits (B, L, vocabulary)."""
        cos, sin = _rotary(self.shape, ids_bl.shape[1], ids_bl.device)
        x = self.model.embed_tokens(ids_bl)
        for layer in self.model.layers:
            x = layer(x, cos, sin, attend)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)


def save_checkpoint(model: TinyQwen3, folder: Path) -> None:
    """Write float16 weights and the configuration as an ordinary Qwen3 checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().to("cpu", torch.float16).contiguous() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shape = model.shape
    end_of_turn, end_of_text = shape.vocabulary - 7, shape.vocabulary - 9
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_turn,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.inner,
        "max_position_embeddings": shape.positions,
        "max_window_layers": shape.layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
    }
    generation = {
        "bos_token_id": end_of_text,
        "do_sample": True,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load_checkpoint(folder: Path, shape: Shape) -> TinyQwen3:
    """The model with the weights of a folder, in float32."""
    model = TinyQwen3(shape)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model


def _rotary(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    steps = torch.arange(0, shape.head_size, 2, device=device, dtype=torch.float32) / shape.head_size
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * shape.rope_theta**-steps
    both = torch.cat([angles, angles], dim=-1)
    return both.cos(), both.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)
