"""What is no Qwen3 checkpoint is refused with a line that says why."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltape.errors import CheckpointError
from rolltape.tiny import TinyEngine
from rolltape.tiny.checkpoint import read_config, read_tensors
from tiny.checkpoints import config_of, random_tensors, write_checkpoint, write_safetensors


def test_formats_are_read_to_the_bit(tmp_path: Path) -> None:
    tensors = random_tensors(config_of())
    for dtype, bits in (("F32", np.float32), ("F16", np.float16)):
        write_safetensors(tmp_path / "model.safetensors", tensors, dtype)
        for name, tensor in read_tensors(tmp_path):
            np.testing.assert_array_equal(tensor, tensors[name].astype(bits).astype(np.float32))
    write_safetensors(tmp_path / "model.safetensors", tensors, "BF16")
    for name, tensor in read_tensors(tmp_path):
        np.testing.assert_array_equal(tensor.view(np.uint32), tensors[name].view(np.uint32) & 0xFFFF0000)


def test_what_ends_a_turn_comes_from_the_generation_config_first(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    assert read_config(tmp_path).eos_ids == (2, 0)
    (tmp_path / "generation_config.json").unlink()
    assert read_config(tmp_path).eos_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"model_type": "qwen3_moe"}, "plain Qwen3"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope type 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "4 heads over 3"),
        ({"num_key_value_heads": 0}, "heads"),
        ({"hidden_size": "big"}, "hidden_size"),
    ],
    ids=str,
)
def test_other_architectures_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(**changes)))
    with pytest.raises(CheckpointError, match=says):
        TinyEngine(tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        TinyEngine(tmp_path / "nothing")
    folder = write_checkpoint(tmp_path / "one")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (b"", whole[:5], whole[:100], whole[:-100], b"\xff" * 200, whole[:8] + b"[]" + whole[10:]):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            TinyEngine(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        TinyEngine(folder)


def test_tensors_must_fit_the_config(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "one")
    tensors = random_tensors(config_of())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.1\.mlp\.up_proj"):
        TinyEngine(folder)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((3, 3), dtype=np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"shape \(3, 3\), but config.json says \(160, 64\)"):
        TinyEngine(folder)


def test_an_index_names_no_files_outside_its_folder(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside"):
        TinyEngine(folder)
