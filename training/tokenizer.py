"""Train the byte-level BPE tokenizer on the synthetic dialogues and write it as an ordinary tokenizer folder.

python -m training.tokenizer src/rolltape/tiny/models/tiny
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from training.dialogue import segments
from training.mixture import any_dialogue

VOCABULARY_SIZE = 4096
SEED = 20261101
DIALOGUES = 12_000

# The last ids, in the order of Qwen3's own tokenizer, which marks only the first three as special.
MARKS = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
)
# Qwen's pattern: every digit stands alone, which is what makes arithmetic learnable.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(dialogues: int = DIALOGUES, seed: int = SEED) -> Tokenizer:
    """A tokenizer of `VOCABULARY_SIZE` entries; all bytes are in it, and no normalizer, so any text comes back."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(dialogues, seed), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark, special in MARKS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json with the chat template in it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(mark)): {
            "content": mark,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": special,
        }
        for mark, special in MARKS
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": (Path(__file__).parent / "chat_template.jinja").read_text(),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _texts(dialogues: int, seed: int) -> Iterator[str]:
    rng = Random(seed)
    at_marks = re.compile("|".join(re.escape(mark) for mark, _ in MARKS))
    for _ in range(dialogues):
        yield from at_marks.split("".join(text for text, _ in segments(any_dialogue(rng))))


if __name__ == "__main__":
    save_tokenizer(train_tokenizer(), Path(sys.argv[1]))
