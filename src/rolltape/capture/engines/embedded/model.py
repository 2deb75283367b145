"""The forward pass of a Qwen3 model in numpy, float32 throughout, over rows of many requests at once."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from rolltape.capture.engines.embedded.attention import Rows, Span
from rolltape.capture.engines.embedded.checkpoint import Floats, ModelConfig, read_config, read_tensors
from rolltape.capture.engines.embedded.linear import Linear, Room
from rolltape.errors import CheckpointError


class _Layer(NamedTuple):
    attention_norm: Floats
    qkv: Linear
    head_norms: Floats  # (heads + kv_heads, head_dim): the query norms with the attention scale in them, the keys'
    out: Linear
    mlp_norm: Floats
    gate_up: Linear
    down: Linear


class Qwen3:
    """The weights of one version. Immutable but for its table of rotations, which only grows."""

    def __init__(
        self, config: ModelConfig, layers: list[_Layer], final_norm: Floats, head: Linear, embed: Floats | None
    ) -> None:
        self.config = config
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._embed = embed  # None: tied to the head
        linears = [head, *(linear for layer in layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down))]
        self.tile = max(linear.tile for linear in linears)
        self._cos = self._sin = np.empty((0, config.head_dim), dtype=np.float32)

    @classmethod
    def load(cls, folder: Path) -> "Qwen3":
        """Read a checkpoint folder; raises CheckpointError if it is none, or of another architecture."""
        config = read_config(folder)
        tensors = dict(read_tensors(folder))
        shapes = _Shapes(config, tensors, folder)
        room = Room(_linear_shapes(config))
        layers = [_layer(shapes, config, f"model.layers.{index}.", room) for index in range(config.layers)]
        final_norm = shapes.take("model.norm.weight", config.hidden_size)
        embed = shapes.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        if config.tied:
            return cls(config, layers, final_norm, Linear(embed, room=room), None)
        head = Linear(shapes.take("lm_head.weight", config.vocab_size, config.hidden_size), room=room)
        return cls(config, layers, final_norm, head, embed)

    def forward(self, spans: list[Span]) -> Floats:
        """Run the spans through the model, adding to their caches; the logits that they want, in order.

        Spans of a single token come first.
        """
        ids = np.array([token for span in spans for token in span.ids])
        positions = np.concatenate([np.arange(span.start, span.start + len(span.ids)) for span in spans])
        x = self._embedded(_padded(ids, self.tile))
        cos, sin = self._rotation(_padded(positions, self.tile))
        rows = Rows(spans, self.config)
        eps = self.config.norm_eps
        with np.errstate(over="ignore"):
            for index, layer in enumerate(self._layers):
                x += self._attention(index, layer, _rms_norm(x, layer.attention_norm, eps), rows, cos, sin)
                x += self._mlp(layer, _rms_norm(x, layer.mlp_norm, eps))
        return self._logits(x, spans)

    def _embedded(self, ids: np.ndarray) -> Floats:
        return self._head.columns(ids) if self._embed is None else self._embed[ids]

    def _attention(self, index: int, layer: _Layer, x: Floats, rows: Rows, cos: Floats, sin: Floats) -> Floats:
        config = self.config
        turning = config.heads + config.kv_heads
        heads = layer.qkv(x).reshape(len(x), turning + config.kv_heads, config.head_dim)
        # In place, so that keys and values stay side by side for the cache.
        _rotate(_rms_norm(heads[:, :turning], layer.head_norms, config.norm_eps), cos, sin, heads[:, :turning])
        queries = heads[:, : config.heads].reshape(len(x), config.kv_heads, -1, config.head_dim)
        both = heads[:, config.heads :].reshape(len(x), 2, config.kv_heads, config.head_dim)
        mixed = np.zeros(queries.shape, dtype=np.float32)
        rows.attend(index, queries, both, mixed)
        return layer.out(mixed.reshape(len(x), -1))

    def _mlp(self, layer: _Layer, x: Floats) -> Floats:
        both = layer.gate_up(x)
        gate, up = both[:, : self.config.intermediate_size], both[:, self.config.intermediate_size :]
        hidden = np.negative(gate)
        np.exp(hidden, out=hidden)
        hidden += 1
        np.divide(gate, hidden, out=hidden)
        hidden *= up
        return layer.down(hidden)

    def _logits(self, x: Floats, spans: list[Span]) -> Floats:
        chosen: list[int] = []
        stop = 0
        for span in spans:
            stop += len(span.ids)
            chosen.extend(range(stop - span.wanted, stop))
        if not chosen:
            return np.empty((0, self.config.vocab_size), dtype=np.float32)
        rows = x[_padded(np.array(chosen), self.tile)]
        return self._head(_rms_norm(rows, self._final_norm, self.config.norm_eps))[: len(chosen)]

    def _rotation(self, positions: np.ndarray) -> tuple[Floats, Floats]:
        last = int(positions.max())
        if last >= len(self._cos):
            dim = self.config.head_dim
            length = min(max(2 * len(self._cos), last + 1, 256), max(self.config.context, last + 1))
            # Frequencies and angles are rounded to float32, as transformers computes them: at far positions
            # that rounding is larger than anything else that differs.
            frequency = 1 / np.power(np.float32(self.config.rope_theta), np.arange(0, dim, 2, dtype=np.float32) / dim)
            angles = np.outer(np.arange(length, dtype=np.float32), frequency.astype(np.float32)).astype(np.float64)
            cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            self._cos, self._sin = np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)
        return self._cos[positions, None], self._sin[positions, None]


def _padded(values: np.ndarray, tile: int) -> np.ndarray:
    """Repeat the last entry up to a multiple of the tile; what is computed for it is thrown away."""
    missing = -len(values) % tile
    return np.concatenate([values, np.repeat(values[-1:], missing)]) if missing else values


def _rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    power: Floats = np.add.reduce(x * x, axis=-1, keepdims=True)
    power /= x.shape[-1]
    power += eps
    np.sqrt(power, out=power)
    scaled: Floats = np.divide(x, power)
    scaled *= weight
    return scaled


def _rotate(x: Floats, cos: Floats, sin: Floats, out: Floats) -> None:
    half = x.shape[-1] // 2
    turned = np.concatenate([x[..., half:], x[..., :half]], axis=-1)
    turned *= sin
    np.multiply(x, cos, out=out)
    out += turned


class _Shapes:
    """Hands out a checkpoint's tensors, each checked against the shape that the config promises."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Floats], folder: Path) -> None:
        self._tensors, self._folder = tensors, folder

    def take(self, name: str, *shape: int) -> Floats:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise CheckpointError(f"{self._folder}: no tensor {name}; is this a whole Qwen3 checkpoint?")
        if tensor.shape != shape:
            raise CheckpointError(f"{self._folder}: {name} has shape {tensor.shape}, but config.json says {shape}")
        return tensor


def _linear_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """The (outputs, inputs) of every product that `_layer` and the head make."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    of_layer = [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]
    return [*(of_layer * config.layers), (config.vocab_size, hidden)]


def _layer(shapes: _Shapes, config: ModelConfig, name: str, room: Room) -> _Layer:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * dim, config.kv_heads * dim
    query_norm = shapes.take(f"{name}self_attn.q_norm.weight", dim) * np.float32(dim**-0.5)
    key_norm = shapes.take(f"{name}self_attn.k_norm.weight", dim)
    return _Layer(
        attention_norm=shapes.take(f"{name}input_layernorm.weight", hidden),
        qkv=Linear(
            shapes.take(f"{name}self_attn.q_proj.weight", queries, hidden),
            shapes.take(f"{name}self_attn.k_proj.weight", keys, hidden),
            shapes.take(f"{name}self_attn.v_proj.weight", keys, hidden),
            room=room,
        ),
        head_norms=np.concatenate([np.tile(query_norm, (config.heads, 1)), np.tile(key_norm, (config.kv_heads, 1))]),
        out=Linear(shapes.take(f"{name}self_attn.o_proj.weight", hidden, queries), room=room),
        mlp_norm=shapes.take(f"{name}post_attention_layernorm.weight", hidden),
        gate_up=Linear(
            shapes.take(f"{name}mlp.gate_proj.weight", inner, hidden),
            shapes.take(f"{name}mlp.up_proj.weight", inner, hidden),
            room=room,
        ),
        down=Linear(shapes.take(f"{name}mlp.down_proj.weight", hidden, inner), room=room),
    )
