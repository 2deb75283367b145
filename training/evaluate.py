"""Measure a checkpoint on held-out problems: right greedily, right at temperature 1, and how groups of eight differ.

    python -m training.evaluate FOLDER [--problems 128] [--json FILE]

Replies come from transformers. A group is eight attempts at one problem at temperature 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean, pstdev
from typing import Any

import torch

from training.dialogue import prompt_text
from training.reply import Attempt, Reply
from training.sampling import Sampler
from training.skills import arithmetic, calculator, formats, guessing, toolcalls
from training.split import Split
from training.words import handbook

SEED = 7_000_000
GROUP = 8

MakeAttempt = Callable[..., Attempt]
SKILLS: dict[str, MakeAttempt] = {
    "arithmetic": arithmetic.attempt,
    "calculator": calculator.attempt,
    "guess the number": guessing.attempt,
    "demanded format": formats.attempt,
    "one of 4 tools": toolcalls.attempt,
    "one of 8 tools": partial(toolcalls.attempt, tools=8),
}


@dataclass
class Running:
    """One attempt under way, what it last asked, and the replies that it got."""

    attempt: Attempt
    asked: Any
    replies: list[Reply]
    reward: float | None = None


@dataclass(frozen=True)
class Measure:
    """One line of the table; `mixed_groups` is the share of groups whose rewards are not all equal."""

    skill: str
    thinking_on: bool
    greedy: float
    sampled: float
    mixed_groups: float
    spread: float
    ended: float
    thinking_as_asked: float


def run(sampler: Sampler, attempts: list[Attempt], temperature: float, seed: int) -> list[Running]:
    """Play all attempts to their end, a round of replies at a time."""
    playing = [Running(attempt, next(attempt), []) for attempt in attempts]
    left, round_number = playing, 0
    while left:
        replies = sampler.replies([prompt_text(one.asked) for one in left], temperature, seed + round_number)
        for one, reply in zip(left, replies, strict=True):
            one.replies.append(reply)
            try:
                one.asked = one.attempt.send(reply)
            except StopIteration as end:
                one.reward = end.value
        left, round_number = [one for one in left if one.reward is None], round_number + 1
    return playing


def measure(sampler: Sampler, problems: int, split: Split) -> list[Measure]:
    """Every skill, thinking off and on."""
    cells = [(name, thinking_on) for thinking_on in (False, True) for name in SKILLS]

    def attempts(copies: int) -> list[Attempt]:
        return [
            SKILLS[name](Random(f"{SEED} {name} {i}"), split, thinking_on=thinking_on)
            for name, thinking_on in cells
            for i in range(problems)
            for _ in range(copies)
        ]

    greedy = run(sampler, attempts(1), 0.0, SEED)
    sampled = run(sampler, attempts(GROUP), 1.0, SEED)
    lines = []
    for place, (name, thinking_on) in enumerate(cells):
        alone = greedy[place * problems : (place + 1) * problems]
        many = sampled[place * problems * GROUP : (place + 1) * problems * GROUP]
        rewards = [[one.reward or 0.0 for one in many[i : i + GROUP]] for i in range(0, len(many), GROUP)]
        replies = [reply for one in many for reply in one.replies]
        lines.append(
            Measure(
                name,
                thinking_on,
                greedy=mean(one.reward or 0.0 for one in alone),
                sampled=mean(mean(group) for group in rewards),
                mixed_groups=mean(float(len(set(group)) > 1) for group in rewards),
                spread=mean(pstdev(group) for group in rewards),
                ended=mean(float(reply.ended) for reply in replies),
                thinking_as_asked=mean(float(bool(reply.thinking) == thinking_on) for reply in replies),
            )
        )
    return lines


def by_operation(sampler: Sampler, split: Split) -> dict[str, dict[str, float]]:
    """Arithmetic taken apart: the share of right replies at temperature 1, thinking off and on."""
    kinds: dict[str, Callable[[Random], arithmetic.Sum]] = {
        "+ two digits": lambda r: arithmetic.Sum(r.randint(10, 99), "+", r.randint(10, 99)),
        "- two digits": lambda r: arithmetic.Sum(r.randint(50, 99), "-", r.randint(10, 50)),
        "+ three digits": lambda r: arithmetic.Sum(r.randint(100, 999), "+", r.randint(100, 999)),
        "- three digits": lambda r: arithmetic.Sum(r.randint(500, 999), "-", r.randint(100, 500)),
        "* two digits by one": lambda r: arithmetic.Sum(r.randint(11, 99), "*", r.randint(3, 9)),
        "* three digits by one": lambda r: arithmetic.Sum(r.randint(100, 999), "*", r.randint(3, 9)),
        "* two digits by two": lambda r: arithmetic.Sum(r.randint(11, 99), "*", r.randint(11, 99)),
        "/ by two to twelve": _division,
    }
    found: dict[str, dict[str, float]] = {}
    for name, make in kinds.items():
        found[name] = {}
        for thinking_on in (False, True):
            attempts = [
                arithmetic.attempt(Random(f"{SEED} {name} {i}"), split, thinking_on=thinking_on, make=make)
                for i in range(256)
            ]
            done = run(sampler, attempts, 1.0, SEED)
            found[name]["thinking on" if thinking_on else "thinking off"] = mean(one.reward or 0.0 for one in done)
    return found


def by_prompt_length(sampler: Sampler, split: Split, problems: int) -> dict[str, float]:
    """Tool calls below ever longer system prompts, greedily, among four tools."""
    found = {}
    for tokens in (500, 1000, 2000, 4000, 8000, 16000):
        attempts = []
        for i in range(problems):
            rng = Random(f"{SEED} long {tokens} {i}")
            system = _filler(sampler, rng, tokens)
            attempts.append(toolcalls.attempt(rng, split, thinking_on=False, system=system))
        found[str(tokens)] = mean(one.reward or 0.0 for one in run(sampler, attempts, 0.0, SEED))
    return found


def table(lines: list[Measure]) -> str:
    """The measures as a Markdown table."""
    head = "| skill | thinking | greedy | temperature 1 | groups that differ | spread in a group "
    head += "| ends its turn | thinks as asked |"
    rows = [
        f"| {m.skill} | {'on' if m.thinking_on else 'off'} | {m.greedy:.2f} | {m.sampled:.2f} | {m.mixed_groups:.2f} "
        f"| {m.spread:.2f} | {m.ended:.3f} | {m.thinking_as_asked:.3f} |"
        for m in lines
    ]
    return "\n".join([head, "| --- | --- | --- | --- | --- | --- | --- | --- |", *rows])


def _division(rng: Random) -> arithmetic.Sum:
    b = rng.randint(2, 12)
    return arithmetic.Sum(b * rng.randint(2, 99), "/", b)


def _filler(sampler: Sampler, rng: Random, tokens: int) -> str:
    ids: list[int] = []
    while len(ids) < tokens:
        ids += sampler.tokenizer.encode(handbook(rng, 10) + "\n\n", add_special_tokens=False)
    return str(sampler.tokenizer.decode(ids[:tokens]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train-split", action="store_true", help="measure on the training side instead")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only-table", action="store_true")
    given = parser.parse_args()
    split = Split.TRAIN if given.train_split else Split.HELD_OUT
    if given.threads:
        torch.set_num_threads(given.threads)
    sampler = Sampler(given.folder, given.device)
    lines = measure(sampler, given.problems, split)
    print(table(lines), flush=True)
    found: dict[str, Any] = {"seed": SEED, "problems": given.problems, "skills": [asdict(line) for line in lines]}
    if not given.only_table:
        found["arithmetic"] = by_operation(sampler, split)
        print(json.dumps(found["arithmetic"], indent=1), flush=True)
        found["tool calls by prompt tokens"] = by_prompt_length(sampler, split, given.problems // 4)
        print(json.dumps(found["tool calls by prompt tokens"]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
