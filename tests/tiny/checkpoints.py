"""Small random Qwen3 checkpoints, written without torch, in the layout that transformers and others read.

`python tests/tiny/checkpoints.py FOLDER SEED` writes one in the shape of the shipped model, with a head of its own.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
END_OF_TEXT, IM_START, IM_END = 0, 1, 2

# The shape of the shipped model, for which the figures are demanded.
LIKE_SHIPPED: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
}


def config_of(**changes: Any) -> dict[str, Any]:
    """A config.json as Qwen3 models have it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **SMALL,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
        **changes,
    }


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Weights with enough spread that the next token is neither certain nor uniform."""
    rng = np.random.default_rng(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = (rng.standard_normal((outputs, inputs)) * gain / np.sqrt(inputs)).astype(
            np.float32
        )
        return values

    def norm(size: int) -> npt.NDArray[np.float32]:
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden, 2.0),
        "model.norm.weight": norm(hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden, 2.0)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        tensors |= {
            f"{layer}self_attn.q_proj.weight": matrix(queries, hidden),
            f"{layer}self_attn.k_proj.weight": matrix(keys, hidden),
            f"{layer}self_attn.v_proj.weight": matrix(keys, hidden),
            f"{layer}self_attn.o_proj.weight": matrix(hidden, queries),
            f"{layer}self_attn.q_norm.weight": norm(dim),
            f"{layer}self_attn.k_norm.weight": norm(dim),
            f"{layer}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}mlp.down_proj.weight": matrix(hidden, inner),
            f"{layer}input_layernorm.weight": norm(hidden),
            f"{layer}post_attention_layernorm.weight": norm(hidden),
        }
    return tensors


def write_safetensors(file: Path, tensors: dict[str, npt.NDArray[np.float32]], dtype: str = "F32") -> None:
    """The file format: header length, JSON header, then the bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, at = [], 0
    for name, tensor in tensors.items():
        data = _encoded(tensor, dtype)
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def _encoded(tensor: npt.NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "BF16":
        return (tensor.view(np.uint32) >> 16).astype("<u2").tobytes()
    return tensor.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def write_checkpoint(folder: Path, *, seed: int = 0, dtype: str = "F32", shards: int = 1, **changes: Any) -> Path:
    """A checkpoint folder with config, weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(**changes)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END, END_OF_TEXT]}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        )
    )
    tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    tensors = random_tensors(config, seed)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return folder
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        write_safetensors(folder / file, part, dtype)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE like Qwen3's: any text can be encoded, tokens may split a character."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [
        "the answer is",
        "higher",
        "lower",
        "calculator",
        "think about it",
        "one two three",
        "größer",
        "héllo wörld",
    ]
    made.train_from_iterator([" ".join(words)] * 4 + [str(number) for number in range(2000)], trainer)
    return made


if __name__ == "__main__":
    shape = {**LIKE_SHIPPED, "tie_word_embeddings": False}
    write_checkpoint(Path(sys.argv[1]), seed=int(sys.argv[2]), **shape)
