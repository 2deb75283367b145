"""The text of a batch under real tokenizers: special tokens visible, one call for all, no id that stops it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import rolltape
from rolltape.errors import RecordError
from rolltape.tracking import traces_from_batch
from rolltape.tracking.batch import decode_segments

TOKENIZER = Path(rolltape.__file__).parent / "tiny" / "models" / "tiny" / "tokenizer.json"
CHAT = ("<|im_start|>user\nWhat is 8 + 9?<|im_end|>\n<|im_start|>assistant\n", "It is 17.<|im_end|>", "\n")


def plain() -> Any:
    return Tokenizer.from_file(str(TOKENIZER))


def fast() -> Any:
    return PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("tokenizer", [plain, fast])
def test_text_comes_back_as_it_was_with_its_special_tokens(tokenizer: Any) -> None:
    ids = [plain().encode(text, add_special_tokens=False).ids for text in CHAT]
    mask = [int(place == 1) for place, part in enumerate(ids) for _ in part]
    batch = {"input_ids": np.array([[token for part in ids for token in part]]), "loss_mask": np.array([mask])}
    (trace,) = traces_from_batch(batch, tokenizer(), split="train", step=0)
    first, last = trace.steps
    assert first.prompt == [{"role": "user", "content": CHAT[0]}]
    assert first.policy_response == {"role": "assistant", "content": CHAT[1]}
    assert last.prompt == [{"role": "user", "content": CHAT[2]}]


@pytest.mark.parametrize("tokenizer", [plain, fast])
def test_ids_that_a_tokenizer_refuses_are_spelled_and_the_rest_is_read(tokenizer: Any) -> None:
    known = plain().encode("yes", add_special_tokens=False).ids
    assert decode_segments(tokenizer(), [known, [-100, -1]]) == ["yes", "#-100 #-1"]


class Ranked:
    """A tokenizer with the methods of tiktoken's, whose many at once takes other options."""

    def decode(self, tokens: list[int], errors: str = "replace") -> str:
        return bytes(tokens).decode(errors=errors)

    def decode_batch(self, batch: list[list[int]], *, errors: str = "replace", num_threads: int = 8) -> list[str]:
        return [self.decode(tokens, errors) for tokens in batch]


def test_a_tokenizer_that_decodes_one_by_one_is_taken() -> None:
    assert decode_segments(Ranked(), [list(b"yes"), list(b"no")]) == ["yes", "no"]


def test_what_cannot_decode_is_refused() -> None:
    with pytest.raises(RecordError, match="the tokenizer is 'qwen3'; give one of transformers or tokenizers"):
        decode_segments("qwen3", [[1]])


def test_neither_torch_nor_trackio_is_loaded_for_a_batch_of_numpy() -> None:
    code = (
        "import sys, numpy as np, rolltape\n"
        "rolltape.traces_from_batch({'input_ids': [[1, 2]], 'loss_mask': [[0, 1]]}, str, split='train', step=0)\n"
        "rolltape.show_batch, rolltape.trackio_sink\n"
        "print([name for name in ('torch', 'trackio', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
