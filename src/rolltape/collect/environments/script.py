"""The other side of a conversation as a generator: it yields what it says, gets the reply, and returns the reward."""

from collections.abc import Generator
from typing import Any

from rolltape.collect.environments.prompts import user
from rolltape.collect.environments.protocol import Answer, Message, Score
from rolltape.collect.environments.scoring import score_from
from rolltape.collect.threads import called
from rolltape.errors import TaskError


class Script:
    """What such a generator has said so far. It may yield text, messages, an Answer, or nothing (None)."""

    def __init__(self, generator: Generator[Any, str, Any], name: str) -> None:
        self._generator = generator
        self._name = name
        self.score = Score(reward=None)
        self.first = self._begun()

    def _begun(self) -> list[Message]:
        try:
            return list(self._answer(next(self._generator)).messages)
        except StopIteration:
            raise TaskError(f"{self._name} ended before the first reply; let it yield before it returns") from None

    async def answer(self, text: str) -> Answer:
        """What it says to a reply; done if it has returned."""
        going_on, said = await called(self._send, text)
        if going_on:
            answer = self._answer(said)
            if answer.done:
                self.score = Score(reward=0.0)  # its steps were rewarded
                self.close()
            return answer
        self.score = Score(reward=None) if said is None else score_from(said, self._name)
        return Answer(done=True)

    def close(self) -> None:
        """The attempt has ended without it."""
        self._generator.close()

    def _send(self, text: str) -> tuple[bool, Any]:
        # StopIteration cannot travel out of a thread's future.
        try:
            return True, self._generator.send(text)
        except StopIteration as end:
            return False, end.value

    def _answer(self, said: Any) -> Answer:
        if isinstance(said, Answer):
            return said
        if said is None:
            return Answer()
        return Answer(messages=[user(said)] if isinstance(said, str) else list(said))
