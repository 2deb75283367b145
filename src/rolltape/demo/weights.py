"""Write checkpoints that have the shape of the shipped model, with an output layer of their own."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rolltape.tape.rundir import write_whole
from rolltape.tiny import shipped_model
from rolltape.tiny.checkpoint import Floats

EMBEDDING, OUTPUT_LAYER = "model.embed_tokens.weight", "lm_head.weight"


def round_to_bfloat16(values: Floats) -> Floats:
    """Round to the nearest bfloat16, and to even where two are as near."""
    bits = values.view(np.uint32)
    rounded: Floats = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return rounded


def write_checkpoint(folder: Path, tensors: Mapping[str, Floats]) -> None:
    """Write a checkpoint in float32 that differs from the shipped one in its tensors alone."""
    shipped = shipped_model()
    if not folder.exists():
        folder.mkdir(parents=True)
        for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(shipped / file, folder)
        config = json.loads((shipped / "config.json").read_text())
        config |= {"tie_word_embeddings": OUTPUT_LAYER not in tensors, "torch_dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    header, end = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": (end, end + values.nbytes)}
        end += values.nbytes
    named = json.dumps(header).encode()
    content = [len(named).to_bytes(8, "little"), named, *(values.tobytes() for values in tensors.values())]
    write_whole(folder / "model.safetensors", b"".join(content))
