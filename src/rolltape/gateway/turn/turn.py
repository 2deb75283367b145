"""One turn, from an agent's request to the delivered reply.

A `GatewayTurn` is a turn in the making, with the clients that wait for it. `Turns` takes it through its states:

    received    the request has been read; it is not a retry of an earlier one
    prompted    the ids of the prompt are known: held ids extended, or the conversation rendered
    generating  engines sample; `shown` holds the part of the reply that can be streamed already
    parsed      the reply has ended and is split into reasoning, text and calls
    durable     the turn is on the tape and in the session's history

Then its clients read the reply. `delivery` states whether one of them got all of it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from rolltape.errors import BadRequest, EngineError, EngineFailed, RequestRefused, TapeError
from rolltape.gateway.engines.pool import EnginePool
from rolltape.gateway.engines.protocol import TOP_LOGPROBS, Generation
from rolltape.gateway.metrics import Metrics
from rolltape.gateway.prompts import ChatPrompts, PromptIds
from rolltape.gateway.request import (
    INLINE_BYTES,
    ChatRequest,
    GivenPrompt,
    SamplingParams,
    TokenDetails,
    instructions_of,
)
from rolltape.gateway.settings import GatewaySettings
from rolltape.gateway.turn.constraints import Constraint, build_constraint, can_cut_calls
from rolltape.gateway.turn.gateway_turn import GatewayTurn, TurnState, restored_turn
from rolltape.gateway.turn.generate import INTERRUPTED, Generator
from rolltape.gateway.turn.history import HistoryMatch
from rolltape.gateway.turn.prompting import Prompt, build_prompt, given_ids, resume_prompt, take_prompt
from rolltape.gateway.turn.replies import cut_at_stop, decide_finish, keep_ids, parse_outcome, turn_fields
from rolltape.gateway.wire.images import count_images
from rolltape.records.turn import Delivery, Finish, Ids, TokenChain, Turn

if TYPE_CHECKING:
    from rolltape.gateway.prompts.splitter import PlainText, ReplySplitter
    from rolltape.gateway.sessions import OpenSession

log = logging.getLogger("rolltape.gateway")

# Defaults that are sent to engines and recorded as applied.
_NEUTRAL = SamplingParams(temperature=1.0, top_p=1.0)
_INLINE_IDS = 1000  # a longer reply is parsed off the event loop
_LEFT_BY_ITSELF_S = 5.0  # if a client leaves sooner and no engine failed, the engine is not to blame
_SAMPLED_ALONE = "top_logprobs: only the logprob of the sampled token is returned"


class Turns:
    """Takes the turns of every session of a gateway."""

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
        self._context = context  # of the engines; None if they do not report it
        self._has_constrained = False  # whether any turn so far was constrained

    # received

    async def submit(self, session: "OpenSession", request: ChatRequest, *, is_retry: bool) -> Sequence[GatewayTurn]:
        """Start the turns of a request, one for each reply, or find them if the request is a retry."""
        if request.n == 1:
            return [await self._submit(session, request, 0, is_retry=is_retry)]
        # All begin before any of them ends, so none is taken for a retry of another.
        submitting = (self._submit(session, request, choice, is_retry=is_retry) for choice in range(request.n))
        found = await asyncio.gather(*submitting, return_exceptions=True)
        turns = [one for one in found if isinstance(one, GatewayTurn)]
        if len(turns) < len(found):
            for turn in turns:
                turn.join()
                turn.leave()
            raise next(one for one in found if isinstance(one, BaseException))
        for turn in turns:
            turn.siblings = turns
        return turns

    async def _submit(
        self, session: "OpenSession", request: ChatRequest, choice: int, *, is_retry: bool
    ) -> GatewayTurn:
        """Start the turn of one reply of a request, or find it if the request is a retry."""
        if request.media and self._settings.images == "refuse":
            raise BadRequest(f"{request.media[0]}: this gateway refuses images and documents; send only text")
        earlier: GatewayTurn | None = None
        while (
            known := self.find_repeated(session, request, choice, is_retry=is_retry)
        ) is not None and known is not earlier:
            if earlier is None:
                self._metrics.count("client_retries", shown_as="retries")
            if known.has_reply:
                return known
            # Its clients have left, or it failed. The new turn continues from the ids sampled so far, unless the
            # reply is complete by then, or another retry was faster.
            await known.settled()
            if known.has_reply:
                return known
            earlier = known
        resumes = earlier if earlier is not None and earlier.sampled_some else None
        turn = GatewayTurn(session, request.for_choice(choice), choice, resumes)
        counts = earlier is None and turn.auxiliary is None
        session.begin(turn, counts=counts)
        if counts and session.task_instructions is None:
            session.task_instructions = instructions_of(request.messages)
        work = asyncio.ensure_future(self._take(turn, counts=counts))
        turn.start(work, self._over)
        session.recent.add(request.digest, choice, turn)
        return turn

    def find_repeated(
        self, session: "OpenSession", request: ChatRequest, choice: int = 0, *, is_retry: bool
    ) -> GatewayTurn | None:
        """The turn that a request retries: the request has a retry header, or no client got the reply."""
        found = session.recent.find(request.digest, choice)
        if isinstance(found, Turn):
            found = restored_turn(session, request, found, self._prompts, self._over)
            session.recent.add(request.digest, choice, found)
        return found if found is not None and (is_retry or found.undelivered) else None

    async def _take(self, turn: GatewayTurn, *, counts: bool) -> None:
        session, reply = turn.session, turn.reply
        try:
            try:
                await self.prompt(turn)
            except BaseException:
                session.turns -= counts  # the request never became a turn, so a retry must not find it
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
        """Build the prompt; raises BadRequest for messages that cannot be rendered.

        A retry of an interrupted turn takes the ids of that turn as its prompt.
        """
        session = turn.session
        turn.thinking = self._thinking(session, turn.request)
        turn.request, withheld = turn.request.with_tools(session.spec.allows)
        if await session.settle_left(turn.request):
            turn.received_at = session.recorder.now()  # an earlier turn that it may continue ended only now
        turn.place = await self._place(session, turn.request, turn.thinking)
        given = turn.request.prompt
        if given is not None and not self._pool.token_faithful:
            raise BadRequest("the prompt is text or token ids, but the engine accepts only messages; send messages")
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
        turn.max_reply_tokens = self._settings.max_reply_tokens if limit is None else limit - len(turn.prompt.ids)
        turn.decided = self._decided(turn)
        turn.sampling = self._applied(turn, sampled)
        turn.constraint, unenforced = self._constraint(turn)
        turn.spell = self._prompts.spell
        if self._pool.token_faithful:
            turn.token_details = turn.request.token_details
            if turn.token_details.top_logprobs and TOP_LOGPROBS not in self._pool.applies:
                turn.token_details = msgspec.structs.replace(turn.token_details, top_logprobs=0)
                turn.ignored_params += (_SAMPLED_ALONE,)
        if turn.request.media and not self._pool.token_faithful:
            turn.request = _without_passed_images(turn.request)
        if turn.request.raw is not None and not self._pool.token_faithful:
            # The endpoint gets the body unchanged, and itself reports what its model does not support.
            turn.request, turn.ignored_params = msgspec.structs.replace(turn.request, media=()), withheld
        else:
            turn.ignored_params += (*self._ignored_params(turn), *unenforced, *withheld)
        if not self._pool.token_faithful:
            turn.ignored_params += self._unsupported_settings(turn)
        turn.reach(TurnState.PROMPTED)

    async def _place(self, session: "OpenSession", request: ChatRequest, thinking: bool | None) -> HistoryMatch:
        options = self._prompts.template_options(thinking)
        is_small = request.body_bytes < INLINE_BYTES
        return await session.work.run(session.history.place, request, request.tools, options, inline=is_small)

    def _thinking(self, session: "OpenSession", request: ChatRequest) -> bool | None:
        """Whether the model is to think: as set by the session, else by the request, else by the gateway."""
        if session.spec.thinking is not None:
            return session.spec.thinking
        return self._settings.thinking if request.thinking is None else request.thinking

    def _decided(self, turn: GatewayTurn) -> SamplingParams:
        """The sampling parameters that are set, in this order: forced, by the agent, the session, the gateway."""
        spec, settings = turn.session.spec, self._settings
        requested = turn.request.sampling.over(spec.sampling).over(settings.sampling)
        return settings.forced.over(spec.forced).over(requested)

    def _applied(self, turn: GatewayTurn, sampled: int) -> SamplingParams:
        """The sampling parameters as engines get them, with a limit of tokens."""
        applied = turn.decided.over(_NEUTRAL)
        if applied.top_p == 0 and self._pool.token_faithful:  # an API's way to say the likeliest; engines refuse it
            applied = msgspec.structs.replace(applied, top_p=1.0, top_k=1)
        limit = self._settings.max_reply_tokens if applied.max_tokens is None else applied.max_tokens
        return msgspec.structs.replace(applied, max_tokens=max(min(limit - sampled, turn.max_reply_tokens), 0))

    def context_of(self, session: "OpenSession | None") -> int | None:
        """How many tokens a prompt and its reply may have in a session, or None if there is no limit."""
        is_counted = self._pool.token_faithful  # a prompt that a hosted endpoint renders cannot be counted here
        limits = (session.spec.context_budget if session is not None and is_counted else None, self._context)
        return min((limit for limit in limits if limit is not None), default=None)

    def _ignored_params(self, turn: GatewayTurn) -> list[str]:
        """Parameters that are understood but not applied; a header and the turn list them."""
        request = turn.request
        unapplied = (name for name in turn.sampling.to_dict() if name not in self._pool.applies)
        ignored = [f"{name}: the engine does not apply it" for name in unapplied]
        if request.thinking is not None and not self._prompts.switches_thinking:
            ignored.append("thinking: the model's template has no switch for it")
        is_shown = request.thinking is not False and not self._pool.token_faithful  # a hosted endpoint is sent "none"
        if (effort := request.effort) is not None and effort.word != "none" and not is_shown:
            ignored.append(f"{effort.field} {ascii(effort.word)[:40]}: not shown to the model")
        if request.messages and request.messages[-1]["role"] == "assistant":
            ignored.append("messages: the last one is the assistant's; the reply follows it and does not continue it")
        if request.media:
            ignored.append(f"{', '.join(request.media[:4])}: shown to the model as a placeholder")
        if (
            not request.parallel_tool_calls
            and self._pool.token_faithful
            and not can_cut_calls(self._prompts.reply_form)
        ):
            ignored.append("parallel_tool_calls: the model may still make several calls")
        return ignored

    def _unsupported_settings(self, turn: GatewayTurn) -> tuple[str, ...]:
        """Settings of the session, the gateway or the agent that a hosted endpoint has no parameter for."""
        spec, request, by_agent = turn.session.spec, turn.request, turn.request.thinking
        has_no_word = by_agent is True and request.effort is None and request.raw is None
        by_gateway = by_agent is None and self._settings.thinking is not None
        unsupported = {
            "thinking": spec.thinking is not None or by_gateway or has_no_word,
            "context_budget": spec.context_budget is not None,
        }
        return tuple(
            f"{name}: a hosted endpoint has no parameter for it" for name, is_set in unsupported.items() if is_set
        )

    def _constraint(self, turn: GatewayTurn) -> tuple[Constraint | None, list[str]]:
        """The constraint that the engine is to enforce, and the request's demands that are not enforced."""
        request, prompt = turn.request, turn.prompt.ids
        if not request.demands or not self._pool.token_faithful:  # a hosted endpoint gets the demands unchanged
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
        """Have engines sample the reply. After an error, what they returned before it is kept."""
        turn.reach(TurnState.GENERATING)
        began = time.perf_counter()
        if turn.max_reply_tokens > 0:
            turn.show_from(self._splitter(turn))
            wanted = Generation(
                id=turn.id,
                session=turn.session.id,
                prompt_ids=turn.prompt.ids,
                sampling=turn.sampling,
                decided=turn.decided,
                stop_ids=tuple(dict.fromkeys((*self._prompts.stop_ids, *turn.request.stop_ids))),
                vocabulary=self._prompts.vocabulary,
                held_tokens=turn.prompt.covered_tokens,
                request=self._request_for_engine(turn),
                top_logprobs=turn.token_details.top_logprobs,
                ids_json=turn.session.ids_json,
                constraint=turn.constraint,
                on_sampled=turn.reply.pass_on if turn.is_live else None,
            )
            try:
                await self._generator.run(wanted, turn.reply)
            except (EngineError, EngineFailed) as error:
                turn.failure = str(error)
                turn.failed = error if isinstance(error, EngineFailed) else None
        turn.engine_s = time.perf_counter() - began

    def _request_for_engine(self, turn: GatewayTurn) -> ChatRequest:
        """The request for an engine that takes messages."""
        if self._pool.token_faithful:
            return turn.request
        return turn.session.endpoint_replies.put_into(turn.request, turn.session.recorder.turns)

    def _splitter(self, turn: GatewayTurn) -> "ReplySplitter | PlainText | None":
        """The splitter that finds what can be streamed, or None if the reply is shown when it has ended."""
        if not turn.request.stream or self._pool.silent_engine is not None:
            return None
        if turn.request.prompt is not None:
            return self._prompts.plain_splitter(turn.sampling.stop or ())
        if not self._prompts.streams:
            return None
        prompt = TokenChain(turn.prompt.ids[: turn.prompt_tokens])
        return self._prompts.splitter(prompt, turn.thinking, turn.sampling.stop or ())

    @property
    def buffered(self) -> str | None:
        """Why streamed replies are shown only when they have ended, or None if they are shown as they are sampled."""
        if (silent := self._pool.silent_engine) is not None:
            return f"{silent} does not stream token ids"
        return (
            None if self._prompts.streams else f"no safe rule is known where calls begin with {self._prompts.renderer}"
        )

    # parsed

    async def _parse(self, turn: GatewayTurn) -> None:
        """Split the reply into its parts, and cut it where a stop string or its first call ends it."""
        reply, before = turn.reply, len(turn.sampled_before)
        if reply.parts and (made := reply.parts[-1].given.prompt_ids) is not None:
            turn.prompt = Prompt(made, None, PromptIds(ids=made, message_starts=None), turn.prompt.prefix_miss)
            turn.token_details = turn.request.token_details
            if turn.token_details.top_logprobs:
                turn.ignored_params += (_SAMPLED_ALONE,)
        if turn.token_details == TokenDetails() and (missing := _missing_details(turn)):
            turn.ignored_params += (f"{missing}: the engine returns only text",)
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
        """Put the turn on the tape, then into its session's history."""
        turn.record(await turn.session.recorder.record_turn_async(**turn_fields(turn)))
        # No turn continues a side request, and a turn after one is not a fork.
        history = turn.session.history
        forked = turn.auxiliary is None and await turn.session.work.run(
            history.add, turn.recorded, turn.prompt, inline=True
        )
        self._metrics.turn(turn, forked=forked)
        turn.reach(TurnState.DURABLE)

    # delivered

    def delivered(self, turn: GatewayTurn, delivery: Delivery) -> None:
        """Record whether a reply arrived. A delivered reply stays delivered."""
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
        """Close a turn that has ended and that no client waits for; if none got the reply, it is undelivered."""
        if turn.delivery is Delivery.UNKNOWN:
            self.delivered(turn, Delivery.UNDELIVERED)
        turn.session.end(turn)

    # questions about a request that take no turn

    async def place(self, session: "OpenSession", request: ChatRequest) -> HistoryMatch:
        """Match a request's history with the turns of a session."""
        offered, _ = request.with_tools(session.spec.allows)
        return await self._place(session, offered, self._thinking(session, request))

    async def continues(self, session: "OpenSession", request: ChatRequest) -> bool:
        """Whether a request's history, or its prompt of ids, contains a reply of a session."""
        if request.prompt is None:
            return bool((await self.place(session, request)).replies)
        prompt = await take_prompt(request.prompt, session.history, self._prompts, session.work)
        return prompt.after is not None

    async def prompt_ids(self, session: "OpenSession | None", request: ChatRequest) -> Ids:
        """The ids of a request's prompt, in a session or outside of any."""
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


def _missing_details(turn: GatewayTurn) -> str:
    """The requested token details that an endpoint of text did not return; "" if there are none."""
    wanted = turn.request.token_details
    if turn.request.raw is not None and turn.upstream.get("logprobs") is not None:
        return "token ids" if wanted.ids else ""
    return "" if wanted == TokenDetails() else "token ids and logprobs"


def _without_passed_images(request: ChatRequest) -> ChatRequest:
    """A request for a hosted endpoint; of its media, only those that the model sees as placeholders are listed."""
    count, passed_on = len(request.media), count_images(request.messages)
    left = (f"{count - passed_on} of {count} media",) if passed_on < count else ()
    return msgspec.structs.replace(request, media=left)


def _log_failure(written: "asyncio.Future[None]") -> None:
    """Log a delivery that could not be written. The reply then trains only if a later request proves it."""
    if not written.cancelled() and (error := written.exception()) is not None:
        log.warning("a delivery could not be recorded: %s", error)
