"""A recorded group whose logprobs are those of a real model, to be handed to other frameworks."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

import rolltape
from rolltape.records.policy import Credit
from rolltape.records.sample import Sample
from rolltape.samples import samples_of_group
from rolltape.tape.recording.session import SessionRecorder
from rolltape.tiny import shipped_model
from taped import assistant, user

REWARDS = (1.0, 0.0, 0.25)
CLOSE = 1e-4  # logprobs of one model, computed alone and in a padded batch


@functools.cache
def causal_model() -> Any:
    """The shipped model in transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float32)
    return model.eval()


def model_logprobs(ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Of each id but the first, given those before it."""
    given = torch.tensor([list(ids)])
    with torch.no_grad():
        logprobs = (causal_model()(given).logits[0, :-1] / temperature).log_softmax(-1)
    values: list[float] = logprobs.gather(1, given[0, 1:, None])[:, 0].tolist()
    return values


class Conversation:
    """Turns of one session over random ids, each with the model's own logprobs."""

    def __init__(self, session: SessionRecorder, seed: int) -> None:
        self._session = session
        self._rng = np.random.default_rng(seed)

    def turn(
        self,
        after: Any = None,
        *,
        prompt: int,
        reply: int,
        said: str = "ask",
        unscored: int | None = None,
        temperature: float = 1.0,
        **given: Any,
    ) -> Any:
        """A turn with so many new prompt ids and so many sampled ones; `unscored` is one without a logprob."""
        new, sampled = self._ids(prompt), self._ids(reply)
        held = [] if after is None else after.tokens.to_numpy().tolist()
        logprobs = [
            None if at == unscored else logprob
            for at, logprob in enumerate(model_logprobs([*held, *new, *sampled], temperature)[-reply:])
        ]
        opening = (
            {"prompt_messages": [user(said)], "prompt_ids": new}
            if after is None
            else {"after": after, "new_messages": [user(said)], "new_prompt_ids": new}
        )
        answered = {"sampled_ids": sampled, "logprobs": logprobs, "reply": assistant(f"{sampled}"), "finish": "stop"}
        how = {"weight_version": "7", "sampling": {"temperature": temperature}, "logprob_kind": "after_temperature"}
        return self._session.record_turn(**{**opening, **answered, **how, **given})

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._rng.integers(100, 4000, count).tolist()
        return ids


def recorded_group(folder: Path, *, forked: bool = False, credit: Credit | None = None) -> list[Sample]:
    """Three attempts at a task: one with a tool's answer, one with a token that has no logprob, one that may fork.

    Where it forks, the first attempt goes on under other weights, too.
    """
    with rolltape.open(folder / "run", name="exp") as tape:
        for attempt, reward in enumerate(REWARDS):
            with tape.rollout(task_id="task", step=4, attempt=attempt) as rollout:
                conversation = Conversation(rollout.session(), seed=attempt)
                first = conversation.turn(prompt=5 + attempt, reply=6 - attempt, unscored=2 if attempt == 1 else None)
                if attempt == 0:
                    conversation.turn(first, prompt=4, reply=3, said="tool", weight_version="8" if forked else "7")
                if attempt == 2:
                    conversation.turn(first, prompt=2, reply=4, said="one way")
                    if forked:
                        conversation.turn(first, prompt=3, reply=5, said="another way")
                rollout.finish(reward=reward)
    run = rolltape.read(folder / "run")
    return list(samples_of_group(list(run.rollouts()), credit=credit, versions=run.versions()))


def ending_unscored(folder: Path) -> list[Sample]:
    """Two attempts of which one ends in a token without a logprob, which does not train."""
    with rolltape.open(folder / "run", name="exp") as tape:
        for attempt, reward in enumerate((1.0, 0.0)):
            with tape.rollout(task_id="task", attempt=attempt) as rollout:
                Conversation(rollout.session(), attempt).turn(prompt=3, reply=4, unscored=None if attempt else 3)
                rollout.finish(reward=reward)
    return list(samples_of_group(list(rolltape.read(folder / "run").rollouts())))


def token_mean_loss(samples: Sequence[Sample]) -> float:
    """What a policy loss is at a ratio of 1 when it takes the mean over trained tokens: by hand, from the samples."""
    tokens = sum(sample.trained_tokens for sample in samples)
    return -sum((sample.advantage or 0.0) * sample.trained_tokens for sample in samples) / tokens


def shifted(column: npt.NDArray[Any] | torch.Tensor) -> Any:
    """The same column one token late: the fault that every test here has to see."""
    return torch.roll(torch.as_tensor(column), 1, -1)
