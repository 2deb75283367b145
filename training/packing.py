"""Dialogues packed into rows of one length; a step's batch is a pure function of seed and step."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.pool import Pool
from operator import itemgetter
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.dialogue import Dialogue, Voice, segments
from training.manner import STEADY, Manner
from training.mixture import any_dialogue

OPEN_ROWS = 8
AHEAD = 200


@dataclass(frozen=True)
class Batch:
    """Rows R of length L: token ids, which dialogue each belongs to (0 is padding), and its `Voice`."""

    ids_rl: NDArray[np.uint16]
    dialogue_rl: NDArray[np.int16]
    voice_rl: NDArray[np.uint8]


@dataclass(frozen=True)
class Packing:
    """How batches are made."""

    tokenizer: Path
    seed: int
    rows: int
    length: int
    manner: Manner = STEADY


def encode(tokenizer: Tokenizer, dialogue: Dialogue) -> tuple[list[int], list[Voice]]:
    """A dialogue's ids and whose they are. Prompt and reply are encoded apart, as when sampling."""
    ids: list[int] = []
    voices: list[Voice] = []
    for voice, run in groupby(segments(dialogue), key=itemgetter(1)):
        piece = tokenizer.encode("".join(text for text, _ in run), add_special_tokens=False).ids
        ids += piece
        voices += [voice] * len(piece)
    return ids, voices


def make_batch(packing: Packing, tokenizer: Tokenizer, step: int) -> Batch:
    """The batch of one step. Dialogues that do not fit into any open row close the fullest one."""
    rng = Random(packing.seed * 1_000_003 + step)
    shape = (packing.rows, packing.length)
    ids_rl = np.zeros(shape, np.uint16)
    dialogue_rl = np.zeros(shape, np.int16)
    voice_rl = np.zeros(shape, np.uint8)
    filled = [0] * packing.rows
    opened = list(range(min(OPEN_ROWS, packing.rows)))
    number, upcoming = 0, len(opened)
    while opened:
        ids, voices = encode(tokenizer, any_dialogue(rng, packing.manner))
        if len(ids) > packing.length:
            continue
        row = next((r for r in opened if filled[r] + len(ids) <= packing.length), None)
        if row is None:
            row = max(opened, key=filled.__getitem__)
            opened.remove(row)
            if upcoming == packing.rows:
                continue
            row = upcoming
            opened.append(row)
            upcoming += 1
        number += 1
        place = slice(filled[row], filled[row] + len(ids))
        ids_rl[row, place], voice_rl[row, place], dialogue_rl[row, place] = ids, voices, number
        filled[row] += len(ids)
    return Batch(ids_rl, dialogue_rl, voice_rl)


def batches(packing: Packing, steps: int, workers: int) -> Iterator[Batch]:
    """The batches of all steps in order, made ahead by worker processes. Call it before CUDA is touched: it forks."""
    if workers == 0:
        tokenizer = Tokenizer.from_file(str(packing.tokenizer))
        return (make_batch(packing, tokenizer, step) for step in range(steps))
    pool = multiprocessing.get_context("fork").Pool(workers, _start_worker, (packing,))
    return _drawn(pool, steps)


def _drawn(pool: Pool, steps: int) -> Iterator[Batch]:
    # Without a bound the workers take every core from the compiler that the first step waits for.
    ahead = threading.Semaphore(AHEAD)

    def wanted() -> Iterator[int]:
        for step in range(steps):
            ahead.acquire()
            yield step

    for batch in pool.imap(_work, wanted()):
        ahead.release()
        yield batch


_packing: Packing
_tokenizer: Tokenizer


def _start_worker(packing: Packing) -> None:
    global _packing, _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _packing, _tokenizer = packing, Tokenizer.from_file(str(packing.tokenizer))


def _work(step: int) -> Batch:
    return make_batch(_packing, _tokenizer, step)
