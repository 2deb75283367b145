"""The recipe: problems keep to their side, replies carry the loss, and a run of seconds works without a GPU."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer
from training.dialogue import Call, Dialogue, Voice, calls, says, segments, tool, user
from training.manner import FALLIBLE, STEADY, Manner
from training.mixture import any_dialogue
from training.packing import Packing, encode, make_batch
from training.reply import read_reply
from training.skills import arithmetic, formats, guessing
from training.split import Problem, Split, draw, side_of

FOLDER = Path(__file__).parents[2] / "src/rolltape/tiny/models/tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def shown(dialogue: Dialogue) -> str:
    """The text, with what the model is to say marked."""
    marked = (f"«{text}»" if voice is Voice.MODEL else text for text, voice in segments(dialogue))
    return "".join(marked).replace("\n", "⏎")


def test_the_model_says_its_replies_and_their_end_and_nothing_else() -> None:
    called = calls(Call("add", {"a": 1}))
    dialogue = Dialogue((user("Hi"), says("Hello"), user("1+1"), called, tool("2"), says("2")))
    assert shown(dialogue) == (
        "<|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎<think>⏎⏎</think>⏎⏎«Hello<|im_end|>»⏎"
        "<|im_start|>user⏎1+1<|im_end|>⏎<|im_start|>assistant⏎<think>⏎⏎</think>⏎⏎"
        '«<tool_call>⏎{"name": "add", "arguments": {"a": 1}}⏎</tool_call><|im_end|>»⏎'
        "<|im_start|>user⏎<tool_response>⏎2⏎</tool_response><|im_end|>⏎"
        "<|im_start|>assistant⏎<think>⏎⏎</think>⏎⏎«2<|im_end|>»⏎"
    )


def test_a_reply_without_its_thinking_is_no_example_when_thinking_is_on() -> None:
    said = (user("1+1"), says("2", "easy"), user("2+2"), says("4", "easy too"))
    stripped = Dialogue(said, thinking_on=True, keep_thinking=False)
    assert shown(stripped) == (
        "<|im_start|>user⏎1+1<|im_end|>⏎<|im_start|>assistant⏎2<|im_end|>⏎"
        "<|im_start|>user⏎2+2<|im_end|>⏎<|im_start|>assistant⏎«<think>⏎easy too⏎</think>⏎⏎4<|im_end|>»⏎"
    )


@pytest.mark.parametrize("make", [arithmetic.any_sum, formats.any_demand, guessing.any_secret])
def test_problems_keep_to_their_side(make: Callable[[Random], Problem]) -> None:
    rng = Random(0)
    for split in Split:
        drawn = [draw(rng, split, make) for _ in range(50)]
        assert {side_of(*problem.key()) for problem in drawn} == {split}


def test_a_sum_and_its_mirror_are_on_one_side() -> None:
    assert arithmetic.Sum(12, "*", 34).key() == arithmetic.Sum(34, "*", 12).key()
    assert arithmetic.Sum(34, "-", 12).key() != arithmetic.Sum(12, "-", 34).key()


@pytest.mark.parametrize("manner", [STEADY, FALLIBLE], ids=["steady", "fallible"])
def test_working_ends_with_the_answer(manner: Manner) -> None:
    rng = Random(1)
    for _ in range(300):
        problem = arithmetic.any_sum(rng)
        working = arithmetic.think(problem, long_division=manner.long_division)
        assert working.endswith(f"{problem.answer}.")


def test_a_reply_is_read_back_as_it_was_said() -> None:
    reply = read_reply(
        '<think>\nI call.\n</think>\n\nWait.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
        ended=True,
    )
    assert (reply.thinking, reply.content, reply.calls) == ("I call.", "Wait.", (Call("f", {"x": 1}),))
    assert reply.well_formed
    assert not read_reply('<tool_call>\n{"name": "f"\n</tool_call>', ended=True).well_formed
    assert not read_reply("<tool_call>\n{", ended=False).well_formed


def test_a_batch_depends_on_seed_and_step_alone(tokenizer: Tokenizer) -> None:
    packing = Packing(FOLDER / "tokenizer.json", seed=3, rows=2, length=1024)
    first, again, other = (make_batch(packing, tokenizer, step) for step in (5, 5, 6))
    assert np.array_equal(first.ids_rl, again.ids_rl)
    assert not np.array_equal(first.ids_rl, other.ids_rl)
    assert (first.voice_rl[first.dialogue_rl == 0] == Voice.TEMPLATE).all()


def test_packed_rows_hold_whole_dialogues(tokenizer: Tokenizer) -> None:
    packing = Packing(FOLDER / "tokenizer.json", seed=4, rows=2, length=1024)
    batch = make_batch(packing, tokenizer, 0)
    rng = Random(4 * 1_000_003)
    fitting = (ids for ids, _ in iter(lambda: encode(tokenizer, any_dialogue(rng)), None) if len(ids) <= 1024)
    assert batch.ids_rl[batch.dialogue_rl == 1].tolist() == next(fitting)


def test_a_run_of_seconds_trains_and_writes_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from training.train import RECIPES, train

    recipe = replace(RECIPES["short"], steps=3, rows=1, length=256)
    losses = train(recipe, tmp_path, workers=0, device="cpu")
    assert losses[0] > losses[-1]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    assert (tmp_path / "model.safetensors").stat().st_size < 15_000_000
    assert (tmp_path / "tokenizer.json").exists()
