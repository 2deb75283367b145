"""The forward pass of a Qwen3 model in numpy, float32 throughout, over rows of many requests at once."""

from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rolltape.errors import CheckpointError
from rolltape.tiny.attention import StepRows, TokenSpan
from rolltape.tiny.checkpoint import Floats, ModelConfig, read_config, read_tensors
from rolltape.tiny.linear import Linear, WeightArena


class _Layer(NamedTuple):
    """One layer's weights. The norms before `qkv` and `gate_up` are multiplied into them."""

    qkv: Linear
    head_norms: Floats  # (heads + kv_heads, head_dim): the query norms with the attention scale, then the key norms
    out: Linear
    gate_up: Linear  # both negated: their product is the same, and exp(-gate) needs no extra step
    down: Linear


class Qwen3:
    """The weights of one version. Immutable except for its table of rotations, which only grows."""

    def __init__(self, folder: Path) -> None:
        """Read a checkpoint folder; raises CheckpointError if it is invalid, or of another architecture."""
        config = self.config = read_config(folder)
        tensors = _Tensors(folder)
        room = WeightArena(_linear_shapes(config))
        self._layers = [_layer(tensors, config, f"model.layers.{index}.", room) for index in range(config.layers)]
        self._final_norm = tensors.norm("model.norm.weight", config.hidden_size)
        embed = tensors.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        head = embed if config.tied else tensors.take("lm_head.weight", config.vocab_size, config.hidden_size)
        self._head = Linear(head, room=room)
        self._embed = None if config.tied else embed  # None if tied to the head
        in_layers = (linear for layer in self._layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down))
        self.tile = max(linear.tile for linear in (self._head, *in_layers))
        self._safe = all(_scores_are_safe(layer.head_norms, config) for layer in self._layers)
        self._turns = np.empty((0, 2, config.head_dim), dtype=np.float32)  # by position: cosines and sines

    def forward(self, spans: list[TokenSpan]) -> Floats:
        """Run the spans through the model and extend their caches. Return the wanted logits in order.

        Spans of a single token come first.
        """
        states, wanted = self._final_states(spans)
        return self._head(states)[:wanted] if wanted else np.empty((0, self.config.vocab_size), dtype=np.float32)

    def final_states(self, spans: list[TokenSpan]) -> Floats:
        """The inputs of the output layer instead of its logits: one row for each wanted token."""
        states, wanted = self._final_states(spans)
        return states[:wanted]

    def _final_states(self, spans: list[TokenSpan]) -> tuple[Floats, int]:
        """The padded rows for the output layer, and how many of them are wanted."""
        x = self._embedded(self._padded([token for span in spans for token in span.ids]))
        cos, sin = self._rotation(self._padded([place for span in spans for place in range(span.start, span.end)]))
        rows = StepRows(spans, len(x), self.config, safe=self._safe)
        eps = self.config.norm_eps
        with np.errstate(over="ignore"):
            for index, layer in enumerate(self._layers):
                x += self._attention(index, layer, _unit(x, eps), rows, cos, sin)
                x += self._mlp(layer, _unit(x, eps))
        stops = accumulate(len(span.ids) for span in spans)
        chosen = [row for stop, span in zip(stops, spans, strict=True) for row in range(stop - span.wanted, stop)]
        if not chosen:
            return np.empty((0, self.config.hidden_size), dtype=np.float32), 0
        return _unit(x[self._padded(chosen)], eps) * self._final_norm, len(chosen)

    def _padded(self, values: list[int]) -> np.ndarray:
        """Repeat the last entry up to a multiple of the tile; the results for the copies are dropped."""
        return np.array(values + values[-1:] * (-len(values) % self.tile))

    def _embedded(self, ids: np.ndarray) -> Floats:
        return self._head.columns(ids) if self._embed is None else self._embed[ids]

    def _attention(self, index: int, layer: _Layer, x: Floats, rows: StepRows, cos: Floats, sin: Floats) -> Floats:
        config = self.config
        turning = config.heads + config.kv_heads
        heads = layer.qkv(x).reshape(len(x), turning + config.kv_heads, config.head_dim)
        unit = _unit(heads[:, :turning], config.norm_eps)
        unit *= layer.head_norms
        # In place, so that keys and values stay side by side for the cache.
        _rotate(unit, cos, sin, heads[:, :turning])
        queries = heads[:, : config.heads].reshape(len(x), config.kv_heads, -1, config.head_dim)
        both = heads[:, config.heads :].reshape(len(x), 2, config.kv_heads, config.head_dim)
        return layer.out(rows.attend(index, queries, both).reshape(len(x), -1))

    def _mlp(self, layer: _Layer, x: Floats) -> Floats:
        both = layer.gate_up(x)
        gate, up = both[:, : self.config.intermediate_size], both[:, self.config.intermediate_size :]
        hidden = np.exp(gate)
        hidden += 1
        np.divide(gate, hidden, out=hidden)
        hidden *= up
        return layer.down(hidden)

    def _rotation(self, positions: np.ndarray) -> tuple[Floats, Floats]:
        last = int(positions.max())
        if last >= len(self._turns):
            dim = self.config.head_dim
            length = min(max(2 * len(self._turns), last + 1, 256), max(self.config.context, last + 1))
            # Frequencies and angles are rounded to float32, as in transformers: at far positions this rounding is
            # larger than all other differences.
            frequency = 1 / np.power(np.float32(self.config.rope_theta), np.arange(0, dim, 2, dtype=np.float32) / dim)
            angles = np.outer(np.arange(length, dtype=np.float32), frequency.astype(np.float32)).astype(np.float64)
            cos, sin = np.cos(angles), np.sin(angles)
            self._turns = np.stack([np.hstack([cos, cos]), np.hstack([-sin, sin])], axis=1).astype(np.float32)
        turns = self._turns[positions]
        return turns[:, :1], turns[:, 1:]


def _unit(x: Floats, eps: float) -> Floats:
    """Each row divided by its length: RMS norm without the factor √size, which is in its weights."""
    length = np.matmul(x[..., None, :], x[..., None])[..., 0]
    length += eps * x.shape[-1]
    np.sqrt(length, out=length)
    unit: Floats = np.divide(x, length)
    return unit


def _rotate(x: Floats, cos: Floats, sin: Floats, out: Floats) -> None:
    halves = (*x.shape[:-1], 2, x.shape[-1] // 2)
    turned = x.reshape(halves)[..., ::-1, :] * sin.reshape(len(x), 1, *halves[-2:])
    np.multiply(x, cos, out=out)
    out += turned.reshape(x.shape)


def _scores_are_safe(head_norms: Floats, config: ModelConfig) -> bool:
    """Whether neither a score nor the sum over a full context can overflow exp, so that softmax needs no maximum."""
    longest = np.abs(head_norms).max(axis=-1)  # of a normed head, whose length is 1 before the weights
    most = longest[: config.heads].max() * longest[config.heads :].max()
    return bool(most + np.log(config.context) < 80)


class _Tensors:
    """Returns a checkpoint's tensors, each checked against the shape in the config."""

    def __init__(self, folder: Path) -> None:
        self._tensors, self._folder = dict(read_tensors(folder)), folder

    def take(self, name: str, *shape: int) -> Floats:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise CheckpointError(f"{self._folder}: no tensor {name}; is this a whole Qwen3 checkpoint?")
        if tensor.shape != shape:
            raise CheckpointError(f"{self._folder}: {name} has shape {tensor.shape}, but config.json says {shape}")
        return tensor

    def norm(self, name: str, size: int) -> Floats:
        """The weights of an RMS norm, for rows of length 1."""
        return self.take(name, size) * np.float32(size**0.5)


def _linear_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """The (outputs, inputs) of every product of `_layer` and the head."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    of_layer = [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]
    return [*(of_layer * config.layers), (config.vocab_size, hidden)]


def _layer(tensors: _Tensors, config: ModelConfig, name: str, room: WeightArena) -> _Layer:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * dim, config.kv_heads * dim
    query_norm = tensors.norm(f"{name}self_attn.q_norm.weight", dim) * np.float32(dim**-0.5)
    key_norm = tensors.norm(f"{name}self_attn.k_norm.weight", dim)
    attention_norm = tensors.norm(f"{name}input_layernorm.weight", hidden)
    mlp_norm = tensors.norm(f"{name}post_attention_layernorm.weight", hidden)
    return _Layer(
        qkv=Linear(
            tensors.take(f"{name}self_attn.q_proj.weight", queries, hidden) * attention_norm,
            tensors.take(f"{name}self_attn.k_proj.weight", keys, hidden) * attention_norm,
            tensors.take(f"{name}self_attn.v_proj.weight", keys, hidden) * attention_norm,
            room=room,
        ),
        head_norms=np.concatenate([np.tile(query_norm, (config.heads, 1)), np.tile(key_norm, (config.kv_heads, 1))]),
        out=Linear(tensors.take(f"{name}self_attn.o_proj.weight", hidden, queries), room=room),
        gate_up=Linear(
            tensors.take(f"{name}mlp.gate_proj.weight", inner, hidden) * -mlp_norm,
            tensors.take(f"{name}mlp.up_proj.weight", inner, hidden) * -mlp_norm,
            room=room,
        ),
        down=Linear(tensors.take(f"{name}mlp.down_proj.weight", hidden, inner), room=room),
    )
