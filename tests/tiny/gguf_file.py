"""A checkpoint folder as one float32 GGUF file, as llama.cpp reads it."""

import json
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer

from rolltape.tiny.checkpoint import read_config, read_tensors


def write_gguf(folder: Path, file: Path) -> Path:
    """Convert; every tensor is written as float32."""
    config = read_config(folder)
    arch = gguf.MODEL_ARCH.QWEN3
    writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer, folder, config.vocab_size, config.eos_ids[0])
    names = gguf.get_tensor_name_map(arch, config.layers)
    for name, tensor in read_tensors(folder):
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None, name
        writer.add_tensor(target, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int, eos: int) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items()}
    texts = [tokenizer.id_to_token(token) or f"<|unused_{token}|>" for token in range(vocab_size)]
    kinds = [
        gguf.TokenType.CONTROL
        if token in special
        else gguf.TokenType.UNUSED
        if tokenizer.id_to_token(token) is None
        else gguf.TokenType.NORMAL
        for token in range(vocab_size)
    ]
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(eos)
    writer.add_add_bos_token(False)
