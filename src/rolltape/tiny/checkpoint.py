"""Load a Qwen3 checkpoint folder, such as the shipped one: its config, its end-of-turn ids, its tensors as float32."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import CheckpointError

Floats = npt.NDArray[np.float32]

_Shape = TypeVar("_Shape")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a Qwen3 model."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context: int  # prompt and reply together, in tokens
    rope_theta: float
    norm_eps: float
    tied: bool  # the output head is the embedding
    eos_ids: tuple[int, ...]  # of the end of a turn, by generation_config.json or else config.json


class _ConfigFile(msgspec.Struct, kw_only=True):
    """The fields of config.json that matter here."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int = 128
    model_type: str = ""
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    use_sliding_window: bool = False
    tie_word_embeddings: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None  # transformers 5 writes the theta here
    quantization_config: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = None


class _GenerationFile(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def shipped_model() -> Path:
    """The folder of the model that ships with Rolltape; raises CheckpointError if the package was built without it."""
    folder = Path(__file__).parent / "models" / "tiny"
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: this installation has no model in it; give the folder of a Qwen3 checkpoint")
    return folder


def read_config(folder: Path) -> ModelConfig:
    """The model's shape; raises CheckpointError for anything but a plain Qwen3 model."""
    file = folder / "config.json"
    raw = _read_json(file, _ConfigFile)
    rope = raw.rope_parameters or {}
    rope_type = (raw.rope_scaling or rope).get("rope_type", (raw.rope_scaling or rope).get("type", "default"))
    unsupported = {
        f"model_type {raw.model_type!r}": raw.model_type != "qwen3",
        f"rope type {rope_type!r}": rope_type != "default",
        f"hidden_act {raw.hidden_act!r}": raw.hidden_act != "silu",
        "attention_bias": raw.attention_bias,
        "use_sliding_window": raw.use_sliding_window,
        "a quantization_config": raw.quantization_config is not None,
    }
    for what, found in unsupported.items():
        if found:
            raise CheckpointError(f"{file}: {what}; the tiny engine runs plain Qwen3 models only")
    kv_heads = raw.num_attention_heads if raw.num_key_value_heads is None else raw.num_key_value_heads
    sizes = (raw.hidden_size, raw.intermediate_size, raw.num_hidden_layers, raw.vocab_size, raw.head_dim, kv_heads)
    if min(sizes) < 1 or raw.num_attention_heads % kv_heads or raw.head_dim % 2:
        raise CheckpointError(f"{file}: {raw.num_attention_heads} heads over {kv_heads} key heads of {raw.head_dim}")
    theta = rope.get("rope_theta", raw.rope_theta)
    return ModelConfig(
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        layers=raw.num_hidden_layers,
        heads=raw.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=raw.head_dim,
        vocab_size=raw.vocab_size,
        context=raw.max_position_embeddings,
        rope_theta=10_000.0 if theta is None else float(theta),
        norm_eps=raw.rms_norm_eps,
        tied=raw.tie_word_embeddings,
        eos_ids=_eos_ids(folder, raw),
    )


def _eos_ids(folder: Path, config: _ConfigFile) -> tuple[int, ...]:
    ids = config.eos_token_id
    file = folder / "generation_config.json"
    if file.is_file():
        own = _read_json(file, _GenerationFile).eos_token_id
        ids = ids if own is None else own
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _read_json(file: Path, shape: type[_Shape]) -> _Shape:
    try:
        return msgspec.json.decode(file.read_bytes(), type=shape)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; give the folder of a Qwen3 checkpoint") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{file}: {error}") from None


class _TensorIndex(msgspec.Struct):
    weight_map: dict[str, str]


class _TensorEntry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}


def read_tensors(folder: Path) -> Iterator[tuple[str, Floats]]:
    """Every tensor of a single-file or sharded checkpoint as float32, one after the other."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(_read_json(index, _TensorIndex).weight_map.values()))
        if any(Path(name).name != name for name in files):
            raise CheckpointError(f"{index}: names files outside its folder")
    else:
        files = ["model.safetensors"]
    for name in files:
        yield from _read_file(folder / name)


def _read_file(file: Path) -> Iterator[tuple[str, Floats]]:
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            size = int.from_bytes(mapped[:8], "little")
            header = msgspec.json.decode(mapped[8 : 8 + size])
            header.pop("__metadata__", None)
            for name, entry in msgspec.convert(header, dict[str, _TensorEntry]).items():
                first, last = (8 + size + offset for offset in entry.data_offsets)
                yield name, _to_float32(mapped[first:last], entry, f"{file}: {name}")
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; the weights must be safetensors") from None
    except (ValueError, AttributeError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{file}: not a safetensors file, or a truncated one: {error}") from None


def _to_float32(data: bytes, entry: _TensorEntry, where: str) -> Floats:
    if entry.dtype not in _DTYPES:
        raise CheckpointError(f"{where} is {entry.dtype}; float16, bfloat16 or float32 is needed")
    values = np.frombuffer(data, dtype=_DTYPES[entry.dtype])
    if entry.dtype == "BF16":
        # numpy has no bfloat16; its bits are the upper half of a float32's.
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.reshape(entry.shape).astype(np.float32, copy=False)
