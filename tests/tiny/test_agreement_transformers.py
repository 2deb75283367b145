"""The engine's logprobs are those of transformers in float32, on every token of long replies."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from rolltape.errors import CheckpointError
from rolltape.tiny import EngineReply, Sampling, TinyEngine, shipped_model
from tiny.checkpoints import LIKE_SHIPPED, config_of, random_tensors, write_checkpoint, write_safetensors

TOLERANCE = 1e-4


class Reference:
    """transformers' forward pass of the same folder."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def logprobs(self, ids: list[int], temperature: float = 1.0) -> npt.NDArray[np.float32]:
        """Of each id but the first, given those before it."""
        with torch.no_grad():
            logits = self._model(torch.tensor([ids])).logits[0, :-1] / temperature
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        values: npt.NDArray[np.float32] = chosen.numpy()
        return values


def check(reference: Reference, prompt: list[int], reply: EngineReply, temperature: float = 1.0) -> None:
    """Every sampled token's logprob, raw and after temperature, and the prompt's own."""
    ids = [*prompt, *reply.ids.tolist()]
    expected = reference.logprobs(ids)
    np.testing.assert_allclose(reply.raw_logprobs, expected[len(prompt) - 1 :], rtol=0, atol=TOLERANCE)
    tempered = reference.logprobs(ids, temperature)[len(prompt) - 1 :]
    np.testing.assert_allclose(reply.tempered_logprobs, tempered, rtol=0, atol=TOLERANCE)
    if reply.prompt_logprobs:
        assert reply.prompt_logprobs[0] is None
        np.testing.assert_allclose(
            [value for value in reply.prompt_logprobs if value is not None],
            expected[: len(prompt) - 1],
            rtol=0,
            atol=TOLERANCE,
        )


def prompts(count: int, vocab: int, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(0, vocab, rng.integers(1, longest)).tolist() for _ in range(count)]


def folders() -> list[str]:
    try:
        shipped_model()
    except CheckpointError:
        return ["random"]
    return ["random", "shipped"]


@pytest.mark.parametrize("which", folders())
async def test_every_token_of_long_dialogues_alone_and_batched(which: str, shaped: Path) -> None:
    folder = shaped if which == "random" else shipped_model()
    reference = Reference(folder)
    async with TinyEngine(folder, context=1200) as engine:
        # A dialogue: each prompt is all that was said before, with something new.
        said = prompts(1, engine.config.vocab_size, 60)[0]
        rng = np.random.default_rng(5)
        for _ in range(3):
            reply = await engine.generate(said, Sampling(seed=len(said), max_tokens=250, stop_ids=()))
            check(reference, said, reply)
            said = [*said, *reply.ids.tolist(), *rng.integers(0, engine.config.vocab_size, 40).tolist()]
        many = prompts(16, engine.config.vocab_size, 260)
        temperatures = [0.7 if index % 2 else 1.0 for index in range(len(many))]
        replies = await asyncio.gather(
            *(
                engine.generate(
                    prompt,
                    Sampling(
                        seed=index, temperature=temperatures[index], max_tokens=50, stop_ids=(), prompt_logprobs_from=0
                    ),
                )
                for index, prompt in enumerate(many)
            )
        )
    for prompt, reply, temperature in zip(many, replies, temperatures, strict=True):
        check(reference, prompt, reply, temperature)


SHAPES: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "F16"},
    "bfloat16": {"dtype": "BF16"},
    "sharded": {"shards": 3},
    "untied": {"tie_word_embeddings": False},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads as heads": {"num_key_value_heads": 4},
    "odd sizes": {"vocab_size": 333, "hidden_size": 60, "intermediate_size": 301, "head_dim": 10},
    "deeper than a block": {"hidden_size": 320, "intermediate_size": 700, "head_dim": 128},
    "theta where transformers 5 keeps it": {
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    },
    "eps": {"rms_norm_eps": 1e-3},
}


@pytest.mark.parametrize("name", SHAPES)
async def test_checkpoints_of_other_shapes_and_formats(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, seed=3, **SHAPES[name])
    reference = Reference(folder)
    async with TinyEngine(folder) as engine:
        for index, prompt in enumerate(prompts(3, engine.config.vocab_size, 200)):
            reply = await engine.generate(
                prompt, Sampling(seed=index, max_tokens=60, stop_ids=(), prompt_logprobs_from=0)
            )
            check(reference, prompt, reply)


async def test_far_positions_turn_as_in_transformers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, **{**LIKE_SHIPPED, "num_hidden_layers": 2})
    reference = Reference(folder)
    async with TinyEngine(folder) as engine:
        prompt = np.random.default_rng(0).integers(0, 4096, 3500).tolist()
        reply = await engine.generate(prompt, Sampling(seed=1, max_tokens=20, stop_ids=(), prompt_logprobs_from=0))
        check(reference, prompt, reply)


async def test_scores_that_would_overflow_exp(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    tensors = random_tensors(config_of())
    for name in tensors:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[name] *= 6  # scores reach 150
    write_safetensors(folder / "model.safetensors", tensors)
    prompt = prompts(1, 320, 200)[0]
    async with TinyEngine(folder) as engine:
        reply = await engine.generate(prompt, Sampling(seed=1, max_tokens=60, stop_ids=()))
    expected = Reference(folder).logprobs([*prompt, *reply.ids.tolist()])[len(prompt) - 1 :]
    # Wider than elsewhere: differences between scores this large are rounded that much.
    np.testing.assert_allclose(reply.raw_logprobs, expected, rtol=0, atol=1e-3)
