"""An agent's long session as an engine would see it: ids like those of real text, a tool result and a reply a turn."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_VOCABULARY = 150_000
_CHARACTERS_A_TOKEN = 4


class NewTurn(NamedTuple):
    """What is new in one turn, and where its prompt and its reply end in the session's ids."""

    messages: list[dict[str, Any]]
    prompt_start: int
    prompt_stop: int
    reply: dict[str, Any]
    reply_stop: int
    logprobs: npt.NDArray[np.float32]


class Workload(NamedTuple):
    """A session in which every prompt extends the one before; all ids in one array."""

    ids: npt.NDArray[np.int32]
    turns: list[NewTurn]

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def as_new(self) -> Iterator[dict[str, Any]]:
        """What to record, turn by turn, without the earlier turn that it comes after."""
        for turn in self.turns:
            yield {
                "new_messages": turn.messages,
                "new_prompt_ids": self.ids[turn.prompt_start : turn.prompt_stop],
                **self._answer(turn),
            }

    def as_whole(self) -> Iterator[dict[str, Any]]:
        """What to record, turn by turn, with the whole prompt each time."""
        messages: list[dict[str, Any]] = []
        for turn in self.turns:
            messages += turn.messages
            yield {
                "prompt_messages": list(messages),
                "prompt_ids": self.ids[: turn.prompt_stop],
                **self._answer(turn),
            }
            messages.append(turn.reply)

    def _answer(self, turn: NewTurn) -> dict[str, Any]:
        return {
            "sampled_ids": self.ids[turn.prompt_stop : turn.reply_stop],
            "logprobs": turn.logprobs,
            "reply": turn.reply,
            "finish": "stop",
            "weight_version": "7",
        }


def agent_session(turns: int, new_tokens: int, sampled: int, first_prompt: int = 0, seed: int = 0) -> Workload:
    """A session that gets `new_tokens` longer with every turn, `sampled` of them by the model."""
    random = np.random.default_rng(seed)
    total = first_prompt + turns * new_tokens
    # Frequent ids are small and rare ones large, as in a byte-pair vocabulary.
    ids = np.exp(random.uniform(0, np.log(_VOCABULARY), total)).astype(np.int32)
    made: list[NewTurn] = []
    at = 0
    for index in range(turns):
        prompt_stop = at + new_tokens - sampled + (first_prompt if index == 0 else 0)
        text = _text(random, (prompt_stop - at) * _CHARACTERS_A_TOKEN)
        opening = [{"role": "system", "content": text}, {"role": "user", "content": f"task {seed}"}]
        result = [{"role": "tool", "tool_call_id": f"call_{index - 1}", "content": text}]
        logprobs = -random.exponential(0.5, sampled).astype(np.float32)
        reply = {
            "role": "assistant",
            "content": _text(random, (sampled - 20) * _CHARACTERS_A_TOKEN),
            "tool_calls": [
                {"id": f"call_{index}", "function": {"name": "run", "arguments": f'{{"command": {index}}}'}}
            ],
        }
        made.append(NewTurn(result if index else opening, at, prompt_stop, reply, prompt_stop + sampled, logprobs))
        at = prompt_stop + sampled
    return Workload(ids, made)


def _text(random: np.random.Generator, characters: int) -> str:
    words = random.integers(0, 4000, max(characters // 6, 1))
    return " ".join(f"w{word:04d}" for word in words)
