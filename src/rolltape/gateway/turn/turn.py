"""One turn, from an agent's request to the delivered reply.

A `GatewayTurn` is a turn in the making and whoever waits for it. `Turns` takes it through its states:

    received    a request was read, and repeats none that is known
    prompted    its prompt's ids are there: held ids extended, or the conversation rendered
    generating  engines sample; what may be shown of the reply already is in `shown`
    parsed      the reply has ended, and is taken apart into reasoning, text and calls
    durable     it is on the tape, and in the session's history

Its clients take it from there: `delivery` says whether one of them got the reply whole.
"""

import asyncio
import enum
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from rolltape.errors import BadRequest, EngineError, EngineFailed, RequestRefused, TapeError
from rolltape.gateway.engines.pool import EnginePool
from rolltape.gateway.engines.protocol import TOP_LOGPROBS, Generation
from rolltape.gateway.engines.sampled import sampled_tops
from rolltape.gateway.metrics import Metrics
from rolltape.gateway.prompts import ChatPrompts, PromptIds
from rolltape.gateway.request import (
    INLINE_BYTES,
    ChatRequest,
    GivenPrompt,
    SamplingParams,
    TokenDetails,
    auxiliary_reason,
    instructions_of,
)
from rolltape.gateway.settings import GatewaySettings
from rolltape.gateway.turn.constraints import Constraint, build_constraint, can_cut_calls
from rolltape.gateway.turn.generate import INTERRUPTED, Generator, ReplySoFar
from rolltape.gateway.turn.history import HistoryMatch
from rolltape.gateway.turn.prompting import Prompt, build_prompt, given_ids, resume_prompt, take_prompt
from rolltape.gateway.turn.replies import (
    ReplyOutcome,
    cut_at_stop,
    decide_finish,
    keep_ids,
    parse_outcome,
    turn_fields,
)
from rolltape.records.ids import parse_turn_id
from rolltape.records.messages import content_text
from rolltape.records.turn import NO_IDS, Delivery, Finish, Ids, Logprobs, TokenChain, Turn

if TYPE_CHECKING:
    from rolltape.gateway.prompts.splitter import ReplySplitter
    from rolltape.gateway.sessions import OpenSession
    from rolltape.samples.spelling import Spell

log = logging.getLogger("rolltape.gateway")

# Defaults that are recorded as applied; engines are sent the same.
_NEUTRAL = SamplingParams(temperature=1.0, top_p=1.0)
_INLINE_IDS = 1000  # a longer reply is parsed off the event loop
_LEFT_BY_ITSELF_S = 5.0  # a client that leaves sooner, and no engine had failed, need not have been kept waiting


_SAMPLED_ALONE = "top_logprobs: the logprob of the sampled token alone is given"


class TurnState(enum.Enum):
    """How far a turn has come."""

    RECEIVED = 0
    PROMPTED = 1
    GENERATING = 2
    PARSED = 3
    DURABLE = 4


class Shown(NamedTuple):
    """What of a reply may be shown to its clients."""

    reasoning: str = ""
    text: str = ""


class GatewayTurn:
    """One turn in the making, and those who wait for it."""

    def __init__(self, session: "OpenSession", request: ChatRequest) -> None:
        self.id = secrets.token_hex(12)  # in the reply's ids, and so in its echo
        self.session = session
        self.request = request
        self.state = TurnState.RECEIVED
        self.received_at = time.time()
        self.auxiliary = auxiliary_reason(request, session.task_instructions) if session else None
        self.digest = b""  # of the request, as it came
        self.choice = 0  # which of the request's replies it is
        self.resumes: GatewayTurn | None = None  # the interrupted turn that a client's retry goes on from
        self.ignored_params = request.ignored_params
        self.choices: Sequence[GatewayTurn] = (self,)  # the turns of its request, one for each reply asked for
        # from PROMPTED on
        self.place: HistoryMatch
        self.prompt: Prompt
        self.prompt_tokens = 0
        self.held_tokens = 0  # of the prompt: those that an earlier turn already held
        self.thinking: bool | None = None
        self.sampling: SamplingParams  # as applied
        self.room = 0  # tokens that the reply may have
        self.constraint: Constraint | None = None  # that the engine is to enforce
        self.token_details = TokenDetails()  # of those asked for, what can be given
        self.spell: Spell  # the bytes of an id
        # from GENERATING on
        self.reply = ReplySoFar(self._show)
        self.engine_s = 0.0
        self.failure: str | None = None  # why engines gave no reply; None: they did, or nobody waited for it
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
        self._changed: asyncio.Future[None] | None = None  # done at the next change; None: nobody looks
        self._splitter: ReplySplitter | None = None  # None: the reply is shown when it has ended

    # What the reply is, once the turn is durable; dialects put it into their words.

    @property
    def message(self) -> dict[str, Any]:
        """The reply in chat form; tool calls carry minted ids, arguments are a JSON text."""
        assert self.outcome.message is not None
        return self.outcome.message

    @property
    def upstream(self) -> Mapping[str, Any]:
        """What a hosted endpoint said beside its message: model, usage, finish reason; empty for other engines."""
        if self.reply.parts:
            return self.reply.parts[-1].given.upstream
        said: Mapping[str, Any] = self.recorded.facts.extra.get("upstream", {}) if self.is_restored else {}
        return said

    @property
    def model(self) -> str:
        """The model that gave the reply, as a hosted endpoint names it, else as the client called it."""
        return self.upstream.get("model") or self.request.model

    @property
    def is_filtered(self) -> bool:
        """Whether a hosted endpoint's content filter ended the reply."""
        return self.upstream.get("finish_reason") == "content_filter"

    @property
    def finish(self) -> Finish:
        """How the reply ended, to its client."""
        return self.outcome.told_finish

    @property
    def stop_string(self) -> str | None:
        """The one that ended it; None: it ended otherwise."""
        return self.outcome.stop_string

    @property
    def reasoning_tokens(self) -> int:
        return self.outcome.reasoning_tokens

    @property
    def over_budget(self) -> bool:
        """Whether the prompt left no room for a reply."""
        return self.room <= 0 and self.resumes is None

    @property
    def sampled_before(self) -> Ids:
        """What had been sampled of the reply before its client asked again."""
        earlier = self.resumes
        return NO_IDS if earlier is None else earlier.recorded.tokens.slice(earlier.prompt_tokens)

    @property
    def is_live(self) -> bool:
        """Whether the reply is shown as it is sampled."""
        return self._splitter is not None

    @property
    def shown(self) -> Shown:
        """What of the reply may be shown now."""
        if self.state is TurnState.DURABLE and self.outcome.message is not None:
            message = self.message
            return Shown(message.get("reasoning_content") or "", content_text(message.get("content")))
        return Shown() if self._splitter is None else Shown(self._splitter.reasoning, self._splitter.text)

    @property
    def prompt_ids(self) -> Ids:
        """The prompt's ids, from PROMPTED on."""
        return self.prompt.ids[: len(self.prompt.ids) - len(self.sampled_before)]

    @property
    def sampled(self) -> tuple[Ids, Logprobs | None]:
        """The reply's ids and logprobs as the tape has them, over all turns that it took; None: it lacks logprobs."""
        parts = self._recorded_parts
        given = [part.logprobs for part in parts if len(part.sampled_ids)]
        known = [one for one in given if one is not None]
        logprobs = np.concatenate([np.empty(0, np.float32), *known]) if len(known) == len(given) else None
        return np.concatenate([part.sampled_ids for part in parts]), logprobs

    @property
    def most_likely(self) -> list[list[tuple[int, float]]]:
        """The most likely ids with their logprobs, as many as were asked for, beside each sampled one."""
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
        """What of the reply may be shown now beyond so many characters of each."""
        if self._splitter is None or self.state is TurnState.DURABLE:
            shown = self.shown
            return Shown(shown.reasoning[reasoning:], shown.text[text:])
        return Shown(self._splitter.reasoning[reasoning:], self._splitter.text[text:])

    # Whoever waits for it.

    def start(self, work: "asyncio.Task[None]", over: Callable[[], None]) -> None:
        """Have `over` called when the work has ended and nobody waits any more."""
        self._task, self._over = work, over
        work.add_done_callback(lambda _: self._settle())

    def restore(self, recorded: Turn, message: dict[str, Any] | None, over: Callable[[], None]) -> None:
        """Become a turn that an earlier gateway recorded, for a client that asks again; `resumes` is set before."""
        facts, extra = recorded.facts, recorded.facts.extra
        self.id = extra.get("reply_id", self.id)
        self.recorded, self.auxiliary, self.is_restored = recorded, facts.auxiliary, True
        self.prompt = resume_prompt(recorded)
        self.received_at = facts.started_at or self.received_at
        self.ignored_params = tuple(recorded.ignored_params)
        self.prompt_tokens = len(recorded.prompt_tokens) - len(self.sampled_before)
        self.held_tokens = extra.get("held_tokens", 0)
        self._count_tokens()
        self.room = 0 if extra.get("over_budget") else 1
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
        self._task = asyncio.get_running_loop().create_future()
        self._task.set_result(None)

    def _count_tokens(self) -> None:
        """Count the reply's tokens, or take a hosted endpoint's word for them."""
        self.sampled_tokens = len(self.recorded.tokens) - self.prompt_tokens
        if usage := self.upstream.get("usage"):
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
            self.sampled_tokens = usage.get("completion_tokens", self.sampled_tokens)
            self.held_tokens = self.recorded.facts.extra.get("cached_tokens", 0)

    def record(self, recorded: Turn) -> None:
        """Take the turn as the tape has it."""
        self.recorded = recorded
        self._count_tokens()

    def join(self) -> None:
        self._waiting += 1

    def leave(self) -> None:
        """One who waited has the reply, or is gone; the last to go before the end has the engine stop."""
        self._waiting -= 1
        if self._waiting == 0 and not self.done:
            self.reply.leave()
        self._settle()

    def _settle(self) -> None:
        assert self._task is not None
        self._notify()
        if self._waiting == 0 and self._task.done():
            if not self._task.cancelled():
                self._task.exception()  # looked at, whether or not somebody waits
            self._over()

    @property
    def done(self) -> bool:
        return self._task is not None and self._task.done()

    @property
    def has_reply(self) -> bool:
        """Whether there is a reply to be had, now or when it has come; not if it failed, or everybody has left."""
        if not self.done:
            return not self.reply.gone
        return self.state is TurnState.DURABLE and self.failure is None and self.outcome.message is not None

    @property
    def undelivered(self) -> bool:
        """Nobody got its reply, and nobody waits for it."""
        return self._waiting == 0 and self.delivery is not Delivery.DELIVERED

    async def ended(self) -> None:
        """Wait until nothing more is done for it; raises what it failed with."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def settled(self) -> None:
        """Wait until nothing more is done for it, whatever it ended with."""
        assert self._task is not None
        await asyncio.wait({self._task})

    async def prompted(self) -> None:
        """Wait until its prompt is there; raises where there can be none."""
        while self.state is TurnState.RECEIVED and not self.done:
            await asyncio.wait({self.change()})
        if self.state is TurnState.RECEIVED:
            await self.ended()

    def change(self) -> "asyncio.Future[None]":
        """Done when there is more to show, or the turn has ended."""
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

    def show_from(self, splitter: "ReplySplitter | None") -> None:
        """Show the reply as it comes, by a splitter of its own; None: when it has ended."""
        self._splitter = splitter
        if splitter is not None:
            splitter.add(self.sampled_before)

    def _show(self, ids: Ids) -> None:
        if self._splitter is not None:
            before = len(self._splitter.reasoning), len(self._splitter.text)
            self._splitter.add(ids)
            if before != (len(self._splitter.reasoning), len(self._splitter.text)):
                self._notify()


class Turns:
    """Takes turns for every session of a gateway."""

    def __init__(
        self,
        prompts: ChatPrompts,
        pool: EnginePool,
        generator: Generator,
        metrics: Metrics,
        settings: GatewaySettings,
        context: int | None,
    ) -> None:
        self._prompts = prompts
        self._pool = pool
        self._generator = generator
        self._metrics = metrics
        self._settings = settings
        self._context = context  # of the engines; None: they do not say
        self._has_constrained = False  # any turn so far

    # received

    async def submit(self, session: "OpenSession", request: ChatRequest, *, says_retry: bool) -> Sequence[GatewayTurn]:
        """Start the turns that a request asks for, one for each reply, or find those that it asks for again."""
        if request.n == 1:
            return [await self._submit(session, request, 0, says_retry=says_retry)]
        # All begin before any of them ends: they are siblings, and none is a retry of another.
        submitting = (self._submit(session, request, choice, says_retry=says_retry) for choice in range(request.n))
        found = await asyncio.gather(*submitting, return_exceptions=True)
        turns = [one for one in found if isinstance(one, GatewayTurn)]
        if len(turns) < len(found):
            for turn in turns:
                turn.join()
                turn.leave()
            raise next(one for one in found if isinstance(one, BaseException))
        for turn in turns:
            turn.choices = turns
        return turns

    async def _submit(
        self, session: "OpenSession", request: ChatRequest, choice: int, *, says_retry: bool
    ) -> GatewayTurn:
        """Start the turn of one of a request's replies, or find it."""
        if request.media and self._settings.images == "refuse":
            raise BadRequest(f"{request.media[0]}: images and documents are refused here; send text alone")
        earlier: GatewayTurn | None = None
        while (
            known := self.find_repeated(session, request, choice, says_retry=says_retry)
        ) is not None and known is not earlier:
            if earlier is None:
                self._metrics.count("client_retries", shown_as="retries")
            if known.has_reply:
                return known
            # All who waited for it have left, or it failed. What it has sampled when it ends is gone on from, unless
            # its reply had all but come, or another retry was faster.
            await known.settled()
            if known.has_reply:
                return known
            earlier = known
        turn = GatewayTurn(session, _with_seed(request, choice))
        turn.digest, turn.choice = request.digest, choice
        turn.resumes = earlier if earlier is not None and _sampled_some(earlier) else None
        counts = earlier is None and turn.auxiliary is None
        session.begin(turn, counts=counts)
        if counts and session.task_instructions is None:
            session.task_instructions = instructions_of(request)
        work = asyncio.ensure_future(self._take(turn, counts=counts))
        turn.start(work, lambda: self._over(turn))
        session.recent.add(turn.digest, choice, turn)
        return turn

    def find_repeated(
        self, session: "OpenSession", request: ChatRequest, choice: int = 0, *, says_retry: bool
    ) -> GatewayTurn | None:
        """The turn that a request repeats: by its own word (a retry header), or since nobody got the reply."""
        digest = request.digest
        found = session.recent.find(digest, choice)
        if found is None and (recorded := session.recent.take_recorded(digest, choice)) is not None:
            found = self._restored(session, request, recorded)
            session.recent.add(digest, choice, found)
        return found if found is not None and (says_retry or found.undelivered) else None

    def _restored(self, session: "OpenSession", request: ChatRequest, recorded: Turn) -> GatewayTurn:
        """A turn that an earlier gateway recorded, and those that it went on from."""
        chain, turns = [recorded], session.recorder.turns
        while (resumed := chain[-1].facts.extra.get("resumes")) is not None:
            chain.append(turns[parse_turn_id(resumed).sequence])
        earlier: GatewayTurn | None = None
        for one in reversed(chain):
            turn = GatewayTurn(session, request)
            turn.resumes, turn.spell, turn.token_details = earlier, self._prompts.spell, request.token_details
            turn.restore(one, self._recorded_message(turn, one), partial(self._over, turn))
            earlier = turn
        return turn

    def _recorded_message(self, turn: GatewayTurn, recorded: Turn) -> dict[str, Any] | None:
        """The reply of a recorded turn; None: it was given up."""
        if recorded.facts.finish in (Finish.ABORT, Finish.ERROR):
            return None
        if recorded.reply is not None or turn.request.prompt is None:
            return None if recorded.reply is None else recorded.reply.to_dict()
        # A given prompt has no messages, and its reply none either.
        ids = np.concatenate([turn.sampled_before, recorded.sampled_ids])
        text = self._prompts.decode_reply(ids, recorded.facts.extra.get("stop_string"))
        return {"role": "assistant", "content": text}

    def is_auxiliary(self, session: "OpenSession", request: ChatRequest) -> bool:
        """Whether a request would be a side request in a session."""
        return auxiliary_reason(request, session.task_instructions) is not None

    async def _take(self, turn: GatewayTurn, *, counts: bool) -> None:
        session, reply = turn.session, turn.reply
        try:
            try:
                await self.prompt(turn)
            except BaseException:
                session.turns -= counts  # it did not come to a turn, and is nothing to be repeated
                session.recent.forget(turn)
                raise
            await self._generate(turn)
            await self._parse(turn)
            await self._record(turn)
            if turn.failure is not None:
                raise turn.failed or EngineFailed(turn.failure)
        except Exception as error:
            if turn.auxiliary is None:
                session.note_failure(error)
            raise
        finally:
            session.used_at = time.monotonic()
            session.waited_s += reply.waited_s
            if not isinstance(turn.failed, RequestRefused):
                session.trouble = next(reversed(reply.engine_errors), session.trouble)
        if turn.auxiliary is None:
            is_to_blame = reply.engine_failed or reply.waited_s >= _LEFT_BY_ITSELF_S
            session.failure = session.trouble if turn.outcome.message is None and is_to_blame else None

    # prompted

    async def prompt(self, turn: GatewayTurn) -> None:
        """Find the prompt; raises BadRequest for what cannot be rendered. An interrupted turn is its own prompt."""
        session = turn.session
        turn.thinking = self._thinking(session, turn.request)
        turn.request, withheld = _offered(turn.request, session)
        await session.settle_left(turn.request)
        turn.place = await self.place(session, turn.request)
        given = turn.request.prompt
        if given is not None and not self._pool.token_faithful:
            raise BadRequest("the prompt is a text or ids, and the engine takes messages alone; send messages")
        if turn.resumes is None and given is not None:
            turn.prompt = await take_prompt(given, session.history, self._prompts, session.work)
        elif turn.resumes is None:
            tools = turn.request.tools
            turn.prompt = await build_prompt(
                turn.place, session.history, self._prompts, tools, turn.thinking, session.work
            )
        else:
            turn.prompt = resume_prompt(turn.resumes.recorded)
        sampled = len(turn.sampled_before)
        turn.prompt_tokens = len(turn.prompt.ids) - sampled
        turn.held_tokens = turn.prompt.held_tokens - sampled
        limit = self.context_of(session)
        turn.room = self._settings.max_reply_tokens if limit is None else limit - len(turn.prompt.ids)
        turn.sampling = self._applied(turn, sampled)
        turn.constraint, unenforced = self._constraint(turn)
        turn.spell = self._prompts.spell
        if self._pool.token_faithful:
            turn.token_details = turn.request.token_details
            if turn.token_details.top_logprobs and TOP_LOGPROBS not in self._pool.applies:
                turn.token_details = msgspec.structs.replace(turn.token_details, top_logprobs=0)
                turn.ignored_params += (_SAMPLED_ALONE,)
        if turn.request.raw is not None and not self._pool.token_faithful:
            # The endpoint gets the body as it came: what the model cannot see or do is for it to say.
            turn.request, turn.ignored_params = msgspec.structs.replace(turn.request, media=()), tuple(withheld)
        else:
            turn.ignored_params += (*self._ignored_params(turn), *unenforced, *withheld)
        if not self._pool.token_faithful:
            turn.ignored_params += self._untold(turn)
        turn.reach(TurnState.PROMPTED)

    async def place(self, session: "OpenSession", request: ChatRequest) -> HistoryMatch:
        """Match a request's history with the turns of a session."""
        offered, _ = _offered(request, session)
        options = self._prompts.template_options(self._thinking(session, request))
        is_small = request.body_bytes < INLINE_BYTES
        return await session.work.run(session.history.place, offered, offered.tools, options, inline=is_small)

    async def continues(self, session: "OpenSession", request: ChatRequest) -> bool:
        """Whether a request's history, or the prompt that it gives, holds a reply of a session."""
        if request.prompt is None:
            return bool((await self.place(session, request)).replies)
        prompt = await take_prompt(request.prompt, session.history, self._prompts, session.work)
        return prompt.after is not None

    def _thinking(self, session: "OpenSession", request: ChatRequest) -> bool | None:
        """Whether the model is to think: as the session says, else the request, else the gateway."""
        said = (session.spec.thinking, request.thinking, self._settings.thinking)
        return next((one for one in said if one is not None), None)

    async def prompt_ids(self, session: "OpenSession | None", request: ChatRequest) -> Ids:
        """The ids of a request's prompt, in a session or by itself."""
        if request.prompt is not None:
            return await asyncio.to_thread(given_ids, request.prompt, self._prompts)
        if session is None or not request.opens_reply:
            thinking = request.thinking if session is None else self._thinking(session, request)
            render = partial(self._prompts.render, request.messages, request.tools, thinking)
            return (await asyncio.to_thread(render, opens_reply=request.opens_reply)).ids
        turn = GatewayTurn(session, request)
        await self.prompt(turn)
        return turn.prompt.ids

    async def prompt_text(self, given: GivenPrompt) -> str:
        """The text of a prompt that is given as ids."""
        return await asyncio.to_thread(lambda: self._prompts.decode(given_ids(given, self._prompts)))

    def _decided(self, turn: GatewayTurn) -> SamplingParams:
        """The sampling parameters that somebody decided: forced ones, the agent's, the session's, the gateway's."""
        spec, settings = turn.session.spec, self._settings
        asked = turn.request.sampling.over(spec.sampling).over(settings.sampling)
        return settings.forced.over(spec.forced).over(asked)

    def _applied(self, turn: GatewayTurn, sampled: int) -> SamplingParams:
        """The sampling parameters as engines get them, with a limit."""
        applied = self._decided(turn).over(_NEUTRAL)
        limit = self._settings.max_reply_tokens if applied.max_tokens is None else applied.max_tokens
        return msgspec.structs.replace(applied, max_tokens=max(min(limit - sampled, turn.room), 0))

    def context_of(self, session: "OpenSession | None") -> int | None:
        """How many tokens a prompt and its reply may have in a session; None: as many as they like."""
        is_counted = self._pool.token_faithful  # nobody counts the tokens of a prompt that an endpoint renders
        limits = (session.spec.context_budget if session is not None and is_counted else None, self._context)
        return min((limit for limit in limits if limit is not None), default=None)

    def _ignored_params(self, turn: GatewayTurn) -> list[str]:
        """Parameters that are understood and not applied; a header and the turn list them."""
        request = turn.request
        unapplied = (name for name in turn.sampling.to_dict() if name not in self._pool.applies)
        ignored = [f"{name}: the engine does not apply it" for name in unapplied]
        if request.thinking is not None and not self._prompts.switches_thinking:
            ignored.append("thinking: the model's template has no switch for it")
        if request.messages and request.messages[-1]["role"] == "assistant":
            ignored.append("messages: the last one is the assistant's; the reply follows it and does not continue it")
        if request.media:
            ignored.append(f"{', '.join(request.media[:4])}: shown to the model as a placeholder")
        if (
            not request.parallel_tool_calls
            and self._pool.token_faithful
            and not can_cut_calls(self._prompts.reply_form)
        ):
            ignored.append("parallel_tool_calls: the model is not kept from calling several")
        return ignored

    def _untold(self, turn: GatewayTurn) -> tuple[str, ...]:
        """What the session or the gateway decides and a hosted endpoint cannot be told."""
        spec, by_agent = turn.session.spec, turn.request.thinking
        untold = {
            "thinking": spec.thinking is not None or (by_agent is None and self._settings.thinking is not None),
            "context_budget": spec.context_budget is not None,
        }
        return tuple(f"{name}: a hosted endpoint cannot be told it" for name, is_set in untold.items() if is_set)

    def _constraint(self, turn: GatewayTurn) -> tuple[Constraint | None, list[str]]:
        """What the engine is to enforce, and what of the request's demands nobody does."""
        request, prompt = turn.request, turn.prompt.ids
        if not request.demands or not self._pool.token_faithful:  # an endpoint is given them as they came
            return None, []
        mode = self._prompts.thinking_at(prompt[: turn.prompt_tokens], turn.thinking)
        level, abilities = self._settings.constrain, self._pool.abilities
        found, ignored = build_constraint(request, self._prompts.reply_form, mode, level, abilities)
        if found is not None and not self._has_constrained:
            self._has_constrained = True
            log.warning(
                "an agent's %s is enforced by constrained decoding; such turns do not train by default, and "
                "--constrain none leaves the model free",
                " and ".join(found.fields),
            )
        if found is None or (rest := found.after(prompt[turn.prompt_tokens :])) is not None:
            return (None if found is None else rest), ignored
        return None, [*ignored, *(f"{field}: {INTERRUPTED}" for field in found.fields)]

    # generating

    async def _generate(self, turn: GatewayTurn) -> None:
        """Have engines sample the reply. What they gave stays, whatever went wrong then."""
        turn.reach(TurnState.GENERATING)
        began = time.perf_counter()
        if turn.room > 0:
            turn.show_from(self._splitter(turn))
            wanted = Generation(
                id=turn.id,
                session=turn.session.id,
                prompt_ids=turn.prompt.ids,
                sampling=turn.sampling,
                decided=self._decided(turn),
                stop_ids=tuple(dict.fromkeys((*self._prompts.stop_ids, *turn.request.stop_ids))),
                vocabulary=self._prompts.vocabulary,
                held_tokens=_covered(turn.prompt.after),
                request=turn.request,
                top_logprobs=turn.token_details.top_logprobs,
                ids_json=turn.session.ids_json,
                constraint=turn.constraint,
                on_sampled=turn.reply.tell if turn.is_live else None,
            )
            try:
                await self._generator.run(wanted, turn.reply)
            except (EngineError, EngineFailed) as error:
                turn.failure = str(error)
                turn.failed = error if isinstance(error, EngineFailed) else None
        turn.engine_s = time.perf_counter() - began

    def _splitter(self, turn: GatewayTurn) -> "ReplySplitter | None":
        """What finds in sampled ids what may be shown; None: the reply is shown when it has ended."""
        if not turn.request.stream or self.buffered is not None or turn.request.prompt is not None:
            return None
        prompt = TokenChain(turn.prompt.ids[: turn.prompt_tokens])
        return self._prompts.splitter(prompt, turn.thinking, turn.request.all_tools, turn.sampling.stop or ())

    @property
    def buffered(self) -> str | None:
        """Why streamed replies are shown when they have ended; None: they are shown as they are sampled."""
        if silent := [engine.name for engine in self._pool.engines if not engine.streams]:
            return f"{silent[0]} does not stream token ids"
        return (
            None if self._prompts.streams else f"no safe rule is known where calls begin with {self._prompts.renderer}"
        )

    # parsed

    async def _parse(self, turn: GatewayTurn) -> None:
        """Take the reply apart, cut where a stop string or its first call ends it."""
        reply, before = turn.reply, len(turn.sampled_before)
        if reply.parts and (made := reply.parts[-1].given.prompt_ids) is not None:
            turn.prompt = Prompt(made, None, PromptIds(ids=made, message_starts=None), turn.prompt.prefix_miss)
            turn.token_details = turn.request.token_details
            if turn.token_details.top_logprobs:
                turn.ignored_params += (_SAMPLED_ALONE,)
        if turn.request.token_details != TokenDetails() and turn.token_details == TokenDetails():
            turn.ignored_params += ("token ids and logprobs: the engine gives text alone",)
        stops = turn.sampling.stop or ()
        reply.parts = cut_at_stop(reply.parts, turn.prompt.ids, before, stops, self._prompts.decode)
        assert turn.sampling.max_tokens is not None
        finish = Finish.ERROR if turn.failure is not None else decide_finish(reply.parts, turn.sampling.max_tokens)
        if reply.sampled < _INLINE_IDS:
            turn.outcome = parse_outcome(turn, finish, self._prompts)
        else:
            turn.outcome = await asyncio.to_thread(parse_outcome, turn, finish, self._prompts)
        if turn.outcome.kept_ids is not None:
            reply.parts = keep_ids(reply.parts, len(turn.prompt.ids), turn.outcome.kept_ids - before)
        if turn.constraint is not None and reply.unconstrained is not None:
            turn.ignored_params += tuple(f"{field}: {reply.unconstrained}" for field in turn.constraint.fields)
        turn.reach(TurnState.PARSED)

    # durable

    async def _record(self, turn: GatewayTurn) -> None:
        """Put the turn on the tape; then it is part of its session's history."""
        turn.record(await turn.session.recorder.record_turn_async(**turn_fields(turn)))
        # Nothing goes on from a side request, and what comes after one has not forked.
        history = turn.session.history
        forked = turn.auxiliary is None and await turn.session.work.run(
            history.add, turn.recorded, turn.prompt, inline=True
        )
        self._metrics.turn(turn, forked=forked)
        turn.reach(TurnState.DURABLE)

    # delivered

    def delivered(self, turn: GatewayTurn, delivery: Delivery) -> None:
        """Say on the tape whether a reply arrived; once it did, nothing else counts."""
        if turn.state is not TurnState.DURABLE or turn.failure or turn.delivery is Delivery.DELIVERED:
            return
        turn.delivery = delivery
        turn.session.deliveries[turn.recorded.id] = delivery
        self._metrics.count("deliveries", delivery.value, shown_as=delivery.value)
        try:
            turn.session.recorder.mark_delivered_async(turn.recorded, delivery).add_done_callback(_log_failure)
        except TapeError as error:
            log.warning("%s is %s, which could not be recorded: %s", turn.recorded.id, delivery.value, error)

    def _over(self, turn: GatewayTurn) -> None:
        """A turn has ended and nobody waits for it; what nobody took is undelivered."""
        if turn.delivery is Delivery.UNKNOWN:
            self.delivered(turn, Delivery.UNDELIVERED)
        turn.session.end(turn)


def _with_seed(request: ChatRequest, choice: int) -> ChatRequest:
    """A request for one of its replies: under the same seed all would be the same."""
    seed = request.sampling.seed
    if seed is None or not choice:
        return request
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, seed=seed + choice))


def _sampled_some(turn: GatewayTurn) -> bool:
    return turn.state is TurnState.DURABLE and len(turn.recorded.tokens) > turn.prompt_tokens


def _offered(request: ChatRequest, session: "OpenSession") -> tuple[ChatRequest, list[str]]:
    """A request with the tools that the model may call, and why others are not among them."""
    tools, deferred = (
        [tool for tool in given if session.spec.allows(_name(tool))]
        for given in (request.tools or [], request.deferred_tools)
    )
    withheld = [_name(tool) for tool in request.all_tools or () if not session.spec.allows(_name(tool))]
    offered = msgspec.structs.replace(request, tools=tools or None, deferred_tools=deferred)
    return offered, [f"tools: {name} is denied in this session" for name in withheld]


def _name(tool: dict[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _covered(after: Turn | None) -> int:
    """Up to which token the routed experts are on the tape already: the engine need not send those again."""
    experts = None if after is None else after.side.get("routed_experts")
    return 0 if experts is None else experts.stop


def _log_failure(written: "asyncio.Future[None]") -> None:
    """A delivery that cannot be written stays unknown, which trains nothing unless a later request proves it."""
    if not written.cancelled() and (error := written.exception()) is not None:
        log.warning("a delivery could not be recorded: %s", error)
