"""Random turns over all APIs that tell token ids: what each reply says equals what the tape has."""

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest

from gateways import CALCULATOR, Answer, Rig, rig, scripted, user
from rolltape.cli import run as rolltape_command
from rolltape.records.turn import Turn
from scripted_engine import Asked, Json, Mishap, Step, tool_call
from told_tokens import Told, encoded, on_tape, post, told

SESSIONS, REQUESTS = 4, 5  # of each seed; ROLLTAPE_SEEDS=40 gives over 1,000 turns
WORDS = ["one", "naïve", "☃", "  ", "\n", "<think>", "</think>\n\n", "été", "stop here", "{}", "<|im_start|>", "x" * 30]


def text(chance: random.Random, most: int = 12) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, most)))


def script(seed: int) -> Any:
    """Replies of random text, calls and ends."""

    def reply(asked: Asked) -> Step:
        chance = random.Random(f"{seed} {asked.number}")
        said = text(chance)
        if chance.random() < 0.2:
            said += tool_call("calculator", {"expression": text(chance, 2)}, chance)
        return Step(said, "length" if chance.random() < 0.2 else "stop")

    return reply


class Asker:
    """Asks within one session, in any API, and keeps what it was told."""

    def __init__(self, it: Rig, opened: Json, chance: random.Random) -> None:
        self._it = it
        self._opened = opened
        self._chance = chance
        self._messages: list[Json] = []
        self._ids: list[int] = []
        self.told: list[list[Told]] = []  # by request and choice

    async def ask(self) -> None:
        chance = self._chance
        kind = chance.choice([self._chat, self._complete, self._generate])
        count, stream = chance.choice([1, 1, 2, 3]), chance.random() < 0.5
        answer = await kind(n=count, stream=stream, max_tokens=chance.choice([3, 20, 200]))
        assert answer.status == 200, answer.raw
        self.told.append([told(answer, index) for index in range(count)])
        if chance.random() < 0.7:  # go on from one of them, in ids
            first, chosen = self.told[-1][0], chance.choice(self.told[-1])
            self._ids = first.prompt_ids + chosen.ids + encoded(self._it, text(chance, 3))

    async def _chat(self, *, stream: bool, **fields: Any) -> Answer:
        details: Json = {"return_token_ids": True, "logprobs": True, "top_logprobs": self._chance.choice([0, 2])}
        self._messages += [user(text(self._chance))]
        fields |= {"tools": [CALCULATOR]} if self._chance.random() < 0.3 else {}
        return await self._it.ask(self._opened, self._messages, stream=stream, **details, **fields)

    async def _complete(self, **fields: Any) -> Answer:
        prompt = self._ids or text(self._chance)
        body: Json = {"model": "it", "prompt": prompt, "return_token_ids": True, "logprobs": 0}
        return await post(self._it, self._opened, "/v1/completions", **body, **fields)

    async def _generate(self, *, stream: bool, **params: Any) -> Answer:
        ids = self._ids or encoded(self._it, text(self._chance))
        body: Json = {"token_ids": ids, "sampling_params": {"logprobs": 1, **params}, "stream": stream}
        return await post(self._it, self._opened, "/inference/v1/generate", return_token_ids=True, **body)


def by_request(turns: list[Turn], counts: list[int]) -> list[list[Turn]]:
    """The turns of each request of a session, by choice."""
    at, found = 0, []
    for count in counts:
        found.append(sorted(turns[at : at + count], key=lambda turn: turn.facts.extra.get("choice", 0)))
        at += count
    assert at == len(turns)
    return found


@pytest.mark.parametrize("seed", range(int(os.environ.get("ROLLTAPE_SEEDS", "2"))))
async def test_replies_tell_what_the_tape_has(run: Path, seed: int) -> None:
    chance = random.Random(seed)
    engine = scripted(
        script(seed), seed=seed, incremental=chance.random() < 0.5, conversation=lambda asked: asked.number
    )
    engine.unknown_logprobs = frozenset(chance.sample(range(20), 2))
    engine.mishaps = dict.fromkeys(chance.sample(range(40), 3), Mishap.ABORTED)
    async with rig(run, engine) as it:
        opened = [await it.open(task_id=f"t{number}") for number in range(SESSIONS)]
        askers = [Asker(it, one, random.Random(f"{seed} {number}")) for number, one in enumerate(opened)]

        async def live(asker: Asker) -> None:
            for _ in range(REQUESTS):
                await asker.ask()

        await asyncio.gather(*map(live, askers))
        sessions = [it.gateway.service.sessions.of_id(one["session"]).recorder.turns for one in opened]
        recorded = {turn.id: turn for turn in it.turns()}
        for one in opened:
            await it.finish(one)
    for asker, turns in zip(askers, sessions, strict=True):
        given = by_request([recorded[turn.id] for turn in turns], [len(one) for one in asker.told])
        for replies, choices in zip(asker.told, given, strict=True):
            assert [(one.ids, one.logprobs) for one in replies] == [on_tape(turn)[1:] for turn in choices]
            assert {tuple(one.prompt_ids) for one in replies} - {()} == {tuple(on_tape(choices[0]).prompt_ids)}
    assert rolltape_command(["check", str(run)]) == 0
