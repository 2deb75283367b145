"""The shipped checkpoint is an ordinary, small Qwen3 checkpoint."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

FOLDER = Path(__file__).parents[2] / "src/rolltape/tiny/models/tiny"
MOST_BYTES = 15_000_000


def test_folder_is_at_most_fifteen_megabytes() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= MOST_BYTES


def test_weights_are_float16_and_finite() -> None:
    weights = safetensors.load_file(FOLDER / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float16}
    assert all(weight.isfinite().all() for weight in weights.values())


def test_ids_in_the_configuration_are_those_of_the_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    config = json.loads((FOLDER / "config.json").read_text())
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    turn, text = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["eos_token_id"] == turn
    assert generation["eos_token_id"] == [turn, text]
    assert config["max_position_embeddings"] >= 4096


def test_transformers_loads_it_as_qwen3_with_nothing_missing() -> None:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert transformers.AutoTokenizer.from_pretrained(FOLDER).eos_token == "<|im_end|>"


def test_the_trained_model_computes_what_transformers_computes() -> None:
    from training.model import Shape, load_checkpoint
    from training.train import _attention, _dense_mask

    ids = torch.randint(0, 4096, (2, 40), generator=torch.Generator().manual_seed(1))
    ours = load_checkpoint(FOLDER, Shape())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with torch.no_grad():
        logits = ours(ids, _attention(_dense_mask(torch.ones_like(ids))))
        torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
