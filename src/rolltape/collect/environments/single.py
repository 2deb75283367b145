"""An episode of one reply: most environments ask once."""

from collections.abc import Awaitable, Callable

from rolltape.collect.environments.prompts import Prompted, opening_of
from rolltape.collect.environments.protocol import AGENT, Answer, Ended, Message, Opening, Score


class SingleReply:
    """Asks what the task asks, takes one reply, and scores it as it was told to."""

    seats = (AGENT,)

    def __init__(self, fields: Prompted, score: Callable[[Ended], Awaitable[Score]]) -> None:
        self._fields = fields
        self._score = score
        self._answered = False

    def opening(self, seat: str) -> Opening:
        return opening_of(self._fields)

    def next_seat(self) -> str | None:
        return None if self._answered else AGENT

    async def answer(self, seat: str, reply: Message) -> Answer:
        self._answered = True
        return Answer(done=True, reward=None)

    async def score(self, seat: str, ended: Ended) -> Score:
        return await self._score(ended)
