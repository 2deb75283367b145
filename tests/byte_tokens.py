"""A run whose tokens are single bytes, with the most likely tokens of each place, and what a trainer made of it."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import rolltape
from taped import assistant, user
from trained_runs import SeenRow, export_samples, samples_of

PROMPT = "Melt!\n"
REPLY = "ok 🫠 é."
PROBABILITIES = (0.5, 0.25, 0.2)  # of the three most likely tokens; what was sampled is the second
LEFT_OUT = len(PROMPT)  # the token that the trainer leaves out, though the tape trains it


def record_bytes(folder: Path) -> Path:
    """Two attempts at one task at step 7; returns the run."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    prompt, reply = (tokenizer.encode(text).ids for text in (PROMPT, REPLY))
    others = [tokenizer.encode(letter).ids[0] for letter in "xy"]
    with rolltape.open(folder / "run", name="exp") as tape:
        tape.announce_version("7")
        for attempt in range(2):
            with tape.rollout(task_id="melt", step=7, attempt=attempt) as rollout:
                rollout.session(tokenizer=str(folder / "tokenizer.json")).record_turn(
                    prompt_messages=[user(PROMPT)],
                    prompt_ids=prompt,
                    sampled_ids=reply,
                    logprobs=[float(np.log(0.25))] * len(reply),
                    reply=assistant(REPLY),
                    finish="stop",
                    weight_version="7",
                    side_arrays={
                        "top_3_ids": {"start": len(prompt), "values": [[others[0], one, others[1]] for one in reply]},
                        "top_3_logprobs": {
                            "start": len(prompt),
                            "values": np.log([PROBABILITIES] * len(reply)),
                        },
                    },
                )
                rollout.finish(reward=float(attempt))
    export_samples(folder / "run", samples_of(folder / "run"), _leave_out)
    return folder / "run"


def _leave_out(rows: list[SeenRow]) -> None:
    rows[0].trained[LEFT_OUT] = False
