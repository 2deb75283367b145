"""A turn in the making: what is known of it in each of its states, and the clients that wait for it.

Clients read the reply from it, while it is sampled or when it has ended; `turn.py` takes it through its states.
"""

import asyncio
import enum
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rolltape.errors import EngineFailed
from rolltape.gateway.engines.sampled import sampled_tops
from rolltape.gateway.prompts import ChatPrompts
from rolltape.gateway.request import ChatRequest, SamplingParams, TokenDetails, auxiliary_reason
from rolltape.gateway.turn.constraints import Constraint
from rolltape.gateway.turn.generate import ReplySoFar
from rolltape.gateway.turn.history import HistoryMatch
from rolltape.gateway.turn.prompting import Prompt, resume_prompt
from rolltape.gateway.turn.replies import ReplyOutcome
from rolltape.records.ids import parse_turn_id
from rolltape.records.messages import content_text
from rolltape.records.turn import NO_IDS, Delivery, Finish, Ids, Logprobs, Turn

if TYPE_CHECKING:
    from rolltape.gateway.prompts.splitter import PlainText, ReplySplitter
    from rolltape.gateway.sessions import OpenSession
    from rolltape.samples.spelling import Spell


class TurnState(enum.Enum):
    """The state of a turn."""

    RECEIVED = 0
    PROMPTED = 1
    GENERATING = 2
    PARSED = 3
    DURABLE = 4


class Shown(NamedTuple):
    """The part of a reply that can be streamed to its clients."""

    reasoning: str = ""
    text: str = ""


class GatewayTurn:
    """One turn in the making, and the clients that wait for it."""

    def __init__(
        self, session: "OpenSession", request: ChatRequest, choice: int = 0, resumes: "GatewayTurn | None" = None
    ) -> None:
        self.id = secrets.token_hex(12)  # in the reply's ids, and so in its echo
        self.session = session
        self.request = request
        self.state = TurnState.RECEIVED
        self.received_at = session.recorder.now() if session else time.time()
        self.auxiliary = auxiliary_reason(request, session.task_instructions) if session else None
        self.choice = choice  # the number of this reply among those of the request
        self.resumes = resumes  # the interrupted turn that this retry continues
        self.ignored_params = request.ignored_params
        self.siblings: Sequence[GatewayTurn] = ()  # the turns of its request, if it asked for several replies
        # from PROMPTED on
        self.place: HistoryMatch
        self.prompt: Prompt
        self.prompt_tokens = 0
        self.held_tokens = 0  # tokens of the prompt that an earlier turn already held
        self.thinking: bool | None = None
        self.decided: SamplingParams  # only those that the agent, the session or the gateway set
        self.sampling: SamplingParams  # as applied
        self.max_reply_tokens = 0
        self.constraint: Constraint | None = None  # that the engine is to enforce
        self.token_details = TokenDetails()  # the requested ones that the engine can return
        self.spell: Spell  # returns the bytes of an id
        # from GENERATING on
        self.reply = ReplySoFar(self._show)
        self.engine_s = 0.0
        self.failure: str | None = None  # why engines returned no reply; None if they did, or all clients left
        self.failed: EngineFailed | None = None  # the error behind it, unless an earlier gateway recorded it
        # from PARSED on
        self.outcome: ReplyOutcome
        # from DURABLE on
        self.recorded: Turn
        self.sampled_tokens = 0
        self.delivery = Delivery.UNKNOWN

        self.is_restored = False  # an earlier gateway recorded it

        self._task: asyncio.Future[None] | None = None
        self._waiting = 0
        self._changed: asyncio.Future[None] | None = None  # done at the next change; None if no client waits for one
        self._splitter: ReplySplitter | PlainText | None = None  # None if the reply is shown when it has ended

    # The reply, once the turn is durable; each dialect writes it in its own format.

    @property
    def message(self) -> dict[str, Any]:
        """The reply in chat form; tool calls carry minted ids, and their arguments are a JSON text."""
        assert self.outcome.message is not None
        return self.outcome.message

    @property
    def upstream(self) -> Mapping[str, Any]:
        """What a hosted endpoint returned beside its message: model, usage, finish reason; empty for other engines."""
        if self.reply.parts:
            return self.reply.parts[-1].given.upstream
        upstream: Mapping[str, Any] = self.recorded.facts.extra.get("upstream", {}) if self.is_restored else {}
        return upstream

    @property
    def model(self) -> str:
        """The model of the reply, as a hosted endpoint names it, else as the client named it."""
        return self.upstream.get("model") or self.request.model

    @property
    def is_filtered(self) -> bool:
        """Whether a hosted endpoint's content filter ended the reply."""
        return self.upstream.get("finish_reason") == "content_filter"

    @property
    def finish(self) -> Finish:
        """How the reply ended, as its client sees it."""
        return self.outcome.finish if self.outcome.kept_ids is None else Finish.STOP

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply, or None if it ended otherwise."""
        return self.outcome.stop_string

    @property
    def reasoning_tokens(self) -> int:
        return self.outcome.reasoning_tokens

    @property
    def over_budget(self) -> bool:
        """Whether the prompt left no room for a reply."""
        return self.max_reply_tokens <= 0 and self.resumes is None

    @property
    def sampled_before(self) -> Ids:
        """The ids of the reply that had been sampled before its client retried."""
        earlier = self.resumes
        return NO_IDS if earlier is None else earlier.recorded.tokens.slice(earlier.prompt_tokens)

    @property
    def is_live(self) -> bool:
        """Whether the reply is shown as it is sampled."""
        return self._splitter is not None

    @property
    def shown(self) -> Shown:
        """The part of the reply that can be streamed now."""
        return self.shown_after(0, 0)

    @property
    def prompt_ids(self) -> Ids:
        """The prompt's ids, from PROMPTED on."""
        return self.prompt.ids[: len(self.prompt.ids) - len(self.sampled_before)]

    @property
    def sampled(self) -> tuple[Ids, Logprobs | None]:
        """The recorded ids and logprobs of the reply, over all turns that it took; no logprobs if some are missing."""
        parts = self._recorded_parts
        given = [part.logprobs for part in parts if len(part.sampled_ids)]
        known = [one for one in given if one is not None]
        logprobs = np.concatenate([np.empty(0, np.float32), *known]) if len(known) == len(given) else None
        return np.concatenate([part.sampled_ids for part in parts]), logprobs

    @property
    def most_likely(self) -> list[list[tuple[int, float]]]:
        """The most likely ids with their logprobs at each sampled token, as many as were requested."""
        count = self.token_details.top_logprobs
        return [top for part in self._recorded_parts for top in sampled_tops(part, count)]

    @property
    def _recorded_parts(self) -> list[Turn]:
        """The turns that the reply took, in their order."""
        parts: list[Turn] = []
        turn: GatewayTurn | None = self
        while turn is not None:
            parts.insert(0, turn.recorded)
            turn = turn.resumes
        return parts

    def shown_after(self, reasoning: int, text: int) -> Shown:
        """The part of the reply that can be streamed now, after so many characters of reasoning and of text."""
        if self.state is TurnState.DURABLE and self.outcome.message is not None:
            message = self.message
            thought, content = message.get("reasoning_content") or "", content_text(message.get("content"))
            return Shown(thought[reasoning:], content[text:])
        if self._splitter is None:
            return Shown()
        return Shown(self._splitter.reasoning[reasoning:], self._splitter.text[text:])

    # The clients that wait for it.

    @property
    def choices(self) -> "Sequence[GatewayTurn]":
        """The turns of its request, one for each requested reply."""
        return self.siblings or (self,)

    def start(self, work: "asyncio.Task[None]", over: "Callable[[GatewayTurn], None]") -> None:
        """Set the task that makes the reply. `over` is called when it has ended and no client waits any more."""
        self._task, self._over = work, over
        work.add_done_callback(lambda _: self._settle())

    def restore(self, recorded: Turn, message: dict[str, Any] | None, over: "Callable[[GatewayTurn], None]") -> None:
        """Become a turn that an earlier gateway recorded, for a client's retry."""
        facts, extra = recorded.facts, recorded.facts.extra
        self.id = extra.get("reply_id", self.id)
        self.recorded, self.auxiliary, self.is_restored = recorded, facts.auxiliary, True
        self.prompt = resume_prompt(recorded)
        self.received_at = facts.started_at or self.received_at
        self.ignored_params = tuple(recorded.ignored_params)
        self.prompt_tokens = len(recorded.prompt_tokens) - len(self.sampled_before)
        self.held_tokens = extra.get("held_tokens", 0)
        self._count_tokens()
        self.max_reply_tokens = 0 if extra.get("over_budget") else 1
        self.failure = facts.error if facts.finish is Finish.ERROR else None
        self.outcome = ReplyOutcome(
            finish=facts.finish,
            message=message,
            stop_string=extra.get("stop_string"),
            reasoning_tokens=extra.get("reasoning_tokens", 0),
            kept_ids=len(recorded.sampled_ids) if extra.get("cut_after_call") else None,
        )
        self.delivery = self.session.deliveries.get(recorded.id, facts.delivery)
        self.state = TurnState.DURABLE
        self._over = over
        self.reply.on_sampled = None
        self._task = asyncio.get_running_loop().create_future()
        self._task.set_result(None)

    def _count_tokens(self) -> None:
        """Count the reply's tokens, or take the counts that a hosted endpoint reports."""
        self.sampled_tokens = len(self.recorded.tokens) - self.prompt_tokens
        if usage := self.upstream.get("usage"):
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
            self.sampled_tokens = usage.get("completion_tokens", self.sampled_tokens)
            self.held_tokens = self.recorded.facts.extra.get("cached_tokens", 0)

    def record(self, recorded: Turn) -> None:
        """Keep the turn as it was recorded."""
        self.recorded = recorded
        self._count_tokens()

    def join(self) -> None:
        self._waiting += 1

    def leave(self) -> None:
        """A client has the reply, or is gone. If the last client leaves before the end, the engine is aborted."""
        self._waiting -= 1
        if self._waiting == 0 and not self.done:
            self.reply.leave()
        self._settle()

    def _settle(self) -> None:
        assert self._task is not None
        self._notify()
        if self._task.done():
            self.reply.on_sampled = None  # breaks a reference cycle, so that an ended session is freed at once
        if self._waiting == 0 and self._task.done():
            if not self._task.cancelled():
                self._task.exception()  # retrieved, so that asyncio does not log it
            self._over(self)

    @property
    def done(self) -> bool:
        return self._task is not None and self._task.done()

    @property
    def has_reply(self) -> bool:
        """Whether there is a reply, now or when the turn ends; not if it failed, or all clients have left."""
        if not self.done:
            return not self.reply.gone
        return self.state is TurnState.DURABLE and self.failure is None and self.outcome.message is not None

    @property
    def sampled_some(self) -> bool:
        """Whether the turn is on the tape with a part of a reply, perhaps of an earlier turn that it resumed."""
        return self.state is TurnState.DURABLE and len(self.recorded.tokens) > self.prompt_tokens

    @property
    def undelivered(self) -> bool:
        """Whether no client got the reply and none waits for it."""
        return self._waiting == 0 and self.delivery is not Delivery.DELIVERED

    async def ended(self) -> None:
        """Wait until its work has ended; raises the error that it failed with."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def settled(self) -> None:
        """Wait until its work has ended; raises no error of it."""
        assert self._task is not None
        await asyncio.wait({self._task})

    async def prompted(self) -> None:
        """Wait until its prompt is known; raises the error if it cannot be built."""
        while self.state is TurnState.RECEIVED and not self.done:
            await asyncio.wait({self.change()})
        if self.state is TurnState.RECEIVED:
            await self.ended()

    def change(self) -> "asyncio.Future[None]":
        """A future that is done when there is more to show, or the turn has ended."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
            if self.done:
                self._changed.set_result(None)
        return self._changed

    def _notify(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    def reach(self, state: TurnState) -> None:
        self.state = state
        self._notify()

    def show_from(self, splitter: "ReplySplitter | PlainText | None") -> None:
        """Show the reply while it is sampled, by this splitter, or with None only when it has ended."""
        self._splitter = splitter
        if splitter is not None:
            splitter.add(self.sampled_before.tolist())

    def _show(self, ids: Sequence[int]) -> None:
        if self._splitter is not None:
            before = len(self._splitter.reasoning), len(self._splitter.text)
            is_over = len(ids) > 0 and ids[-1] in self.request.stop_ids
            self._splitter.add(ids[:-1] if is_over else ids)
            if before != (len(self._splitter.reasoning), len(self._splitter.text)):
                self._notify()


def restored_turn(
    session: "OpenSession",
    request: ChatRequest,
    recorded: Turn,
    prompts: ChatPrompts,
    over: Callable[[GatewayTurn], None],
) -> GatewayTurn:
    """The turn that an earlier gateway recorded for a request, with the interrupted turns that it continued."""
    chain, turns = [recorded], session.recorder.turns
    while (resumed := chain[-1].facts.extra.get("resumes")) is not None:
        chain.append(turns[parse_turn_id(resumed).sequence])
    earlier: GatewayTurn | None = None
    for one in reversed(chain):
        turn = GatewayTurn(session, request, resumes=earlier)
        turn.spell, turn.token_details = prompts.spell, request.token_details
        turn.restore(one, _recorded_message(turn, one, prompts), over)
        earlier = turn
    return turn


def _recorded_message(turn: GatewayTurn, recorded: Turn, prompts: ChatPrompts) -> dict[str, Any] | None:
    """The reply of a recorded turn, or None if it was aborted or failed."""
    if recorded.facts.finish in (Finish.ABORT, Finish.ERROR):
        return None
    if recorded.reply is not None or turn.request.prompt is None:
        return None if recorded.reply is None else recorded.reply.to_dict()
    # A turn whose prompt came as text or ids records no messages.
    ids = np.concatenate([turn.sampled_before, recorded.sampled_ids])
    text = prompts.decode_reply(ids, turn.request.stop_ids, recorded.facts.extra.get("stop_string"))
    return {"role": "assistant", "content": text}
