"""One turn from request to reply: placed, prompted, generated, parsed, and durable before it is delivered."""

import asyncio
import logging
import secrets
import time
from functools import partial
from typing import Any, NamedTuple

import msgspec

from rolltape.errors import EngineError, EngineFailed
from rolltape.gateway.engines.pool import EnginePool
from rolltape.gateway.engines.protocol import Generation
from rolltape.gateway.metrics import Metrics
from rolltape.gateway.prompts import ChatPrompts
from rolltape.gateway.request import INLINE_BYTES, ChatRequest, Draft, Reply, SamplingParams, Usage
from rolltape.gateway.sessions import OpenSession
from rolltape.gateway.settings import GatewaySettings
from rolltape.gateway.turn.auxiliary import auxiliary_reason
from rolltape.gateway.turn.constraints import Constraint, build_constraint, can_cut_calls, demanding_fields
from rolltape.gateway.turn.generate import INTERRUPTED, Caller, Generator, PartialGeneration
from rolltape.gateway.turn.history import HistoryMatch
from rolltape.gateway.turn.prompting import Prompt, build_prompt, resume_prompt
from rolltape.gateway.turn.replies import (
    ReplyOutcome,
    build_segments,
    cut_at_stop,
    decide_finish,
    join_side_arrays,
    keep_ids,
    parse_outcome,
)
from rolltape.records.turn import NO_IDS, Delivery, Finish, Ids, Turn, TurnFlag

log = logging.getLogger("rolltape.gateway")

# Defaults that are recorded as applied; engines are sent the same.
_NEUTRAL = SamplingParams(temperature=1.0, top_p=1.0)
_INLINE_IDS = 1000  # a longer reply is parsed off the event loop


class Begun(NamedTuple):
    """A turn whose prompt is there."""

    session: OpenSession
    ask: ChatRequest
    place: HistoryMatch
    prompt: Prompt
    draft: Draft
    applied: SamplingParams
    room: int  # tokens that the reply may have
    thinking: bool | None
    resumed: "Resumed | None"  # the interrupted turn that a client's retry goes on from
    auxiliary: str | None
    ignored_params: tuple[str, ...]
    constraint: Constraint | None  # that the engine is to enforce
    started_at: float

    @property
    def over_budget(self) -> bool:
        """Whether the prompt left no room for a reply."""
        return self.room <= 0 and self.resumed is None


class Taken(NamedTuple):
    """A turn that is on the tape, and the reply to hand over."""

    begun: Begun
    turn: Turn
    reply: Reply | None  # None: it was given up, since nobody waited for it any more


class Resumed(NamedTuple):
    """A turn that was given up, and how many of its tokens are the prompt; what follows is the reply so far."""

    turn: Turn
    prompt_tokens: int

    @property
    def sampled_ids(self) -> Ids:
        return self.turn.tokens.slice(self.prompt_tokens)


def resumed_from(taken: Taken) -> Resumed | None:
    """What a retry goes on from; None: nothing had been sampled."""
    resumed = Resumed(taken.turn, taken.begun.draft.prompt_tokens)
    return resumed if len(resumed.sampled_ids) else None


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

    async def begin(self, session: OpenSession, ask: ChatRequest, resumed: Resumed | None = None) -> Begun:
        """Find the prompt; raises BadRequest for what cannot be rendered. A resumed turn is its own prompt."""
        started_at = time.time()
        spec = session.spec
        thinking = next(
            (one for one in (spec.thinking, ask.thinking, self._settings.thinking) if one is not None), None
        )
        offered, withheld = _offered(ask, session)
        tools = offered.tools
        options = self._prompts.template_options(thinking)
        is_small = ask.body_bytes < INLINE_BYTES
        place = await session.work.run(session.history.place, ask, tools, options, inline=is_small)
        if resumed is None:
            prompt = await build_prompt(place, session.history, self._prompts, tools, thinking, session.work)
        else:
            prompt = resume_prompt(resumed.turn)
        sampled = 0 if resumed is None else len(resumed.sampled_ids)
        room = self._room(session, len(prompt.ids))
        asked = ask.sampling.over(spec.sampling).over(self._settings.sampling)
        applied = self._settings.forced.over(spec.forced).over(asked).over(_NEUTRAL)
        limit = self._settings.max_reply_tokens if applied.max_tokens is None else applied.max_tokens
        applied = msgspec.structs.replace(applied, max_tokens=max(min(limit - sampled, room), 0))
        constraint, unenforced = self._constraint(offered, prompt.ids, sampled, thinking)
        return Begun(
            session=session,
            ask=offered,
            place=place,
            prompt=prompt,
            draft=Draft(
                id=secrets.token_hex(12),
                model=ask.model,
                created_at=started_at,
                prompt_tokens=len(prompt.ids) - sampled,
                held_tokens=prompt.held_tokens - sampled,
            ),
            applied=applied,
            room=room,
            thinking=thinking,
            resumed=resumed,
            auxiliary=auxiliary_reason(ask, session.task_instructions),
            ignored_params=(*ask.ignored_params, *self._ignored_params(offered, applied), *unenforced, *withheld),
            constraint=constraint,
            started_at=started_at,
        )

    async def finish(self, begun: Begun, caller: Caller) -> Taken:
        """Generate, record, and give the reply; raises EngineFailed if there is none. Recorded in every case."""
        stretches: list[PartialGeneration] = []
        engine_began = time.perf_counter()
        failure: str | None = None
        if begun.room > 0:
            wanted = Generation(
                id=begun.draft.id,
                session=begun.session.id,
                prompt_ids=begun.prompt.ids,
                sampling=begun.applied,
                stop_ids=self._prompts.stop_ids,
                vocabulary=self._prompts.vocabulary,
                held_tokens=_covered(begun.prompt.after),
                request=begun.ask,
                ids_json=begun.session.ids_json,
                constraint=begun.constraint,
            )
            try:
                await self._generator.run(wanted, caller, stretches)
            except (EngineError, EngineFailed) as error:
                failure = str(error)
        engine_s = time.perf_counter() - engine_began
        before = 0 if begun.resumed is None else len(begun.resumed.sampled_ids)
        stretches = cut_at_stop(stretches, begun.prompt.ids, before, begun.applied.stop or (), self._prompts.decode)
        outcome = await self._outcome(begun, stretches, failure)
        if outcome.kept_ids is not None:
            stretches = keep_ids(stretches, len(begun.prompt.ids), outcome.kept_ids - before)
        if begun.constraint is not None and caller.unconstrained is not None:
            lost = (f"{field}: {caller.unconstrained}" for field in begun.constraint.fields)
            begun = begun._replace(ignored_params=(*begun.ignored_params, *lost))
        turn = await self._recorded(begun, stretches, outcome, failure, caller.engine_errors)
        # Nothing goes on from a side request, and what comes after one has not forked.
        forked = begun.auxiliary is None and await begun.session.work.run(
            begun.session.history.add, turn, begun.prompt, inline=True
        )
        self._metrics.turn(begun, turn, outcome, engine_s, forked=forked)
        if failure is not None:
            raise EngineFailed(failure)
        usage = Usage(
            prompt_tokens=begun.draft.prompt_tokens,
            held_tokens=begun.draft.held_tokens,
            sampled_tokens=len(turn.tokens) - begun.draft.prompt_tokens,
            reasoning_tokens=outcome.reasoning_tokens,
        )
        if outcome.message is None:
            return Taken(begun, turn, None)
        reply = Reply(
            draft=begun.draft,
            message=outcome.message,
            finish=outcome.told_finish,
            stop_string=outcome.stop_string,
            over_budget=begun.over_budget,
            usage=usage,
        )
        return Taken(begun, turn, reply)

    def _room(self, session: OpenSession, prompt_tokens: int) -> int:
        """How many tokens a reply may have at most; none above the budget."""
        limit = self.context_of(session)
        return self._settings.max_reply_tokens if limit is None else limit - prompt_tokens

    def context_of(self, session: OpenSession) -> int | None:
        """How many tokens a prompt and its reply may have in a session; None: as many as they like."""
        limits = (session.spec.context_budget, self._context)
        return min((limit for limit in limits if limit is not None), default=None)

    def _ignored_params(self, ask: ChatRequest, applied: SamplingParams) -> list[str]:
        """Parameters that are understood and not applied; a header and the turn list them."""
        unapplied = (name for name in applied.to_dict() if name not in self._pool.applies)
        ignored = [f"{name}: the engine does not apply it" for name in unapplied]
        if ask.thinking is not None and not self._prompts.switches_thinking:
            ignored.append("thinking: the model's template has no switch for it")
        if ask.messages and ask.messages[-1]["role"] == "assistant":
            ignored.append("messages: the last one is the assistant's; the reply follows it and does not continue it")
        if ask.media:
            ignored.append(f"{', '.join(ask.media[:4])}: shown to the model as a placeholder")
        if not ask.parallel_tool_calls and self._pool.token_faithful and not can_cut_calls(self._prompts.reply_form):
            ignored.append("parallel_tool_calls: the model is not kept from calling several")
        return ignored

    def _constraint(
        self, ask: ChatRequest, prompt: Ids, sampled: int, thinking: bool | None
    ) -> tuple[Constraint | None, list[str]]:
        """What the engine is to enforce, and what of the request's demands nobody does.

        The last `sampled` ids of the prompt are the reply's already.
        """
        if not demanding_fields(ask) or not self._pool.token_faithful:  # an endpoint is given them as they came
            return None, []
        begins = len(prompt) - sampled
        mode = self._prompts.thinking_at(prompt[:begins], thinking)
        level, abilities = self._settings.constrain, self._pool.abilities
        found, ignored = build_constraint(ask, self._prompts.reply_form, mode, level, abilities)
        if found is not None and not self._has_constrained:
            self._has_constrained = True
            log.warning(
                "an agent's %s is enforced by constrained decoding; such turns do not train by default, and "
                "--constrain none leaves the model free",
                " and ".join(found.fields),
            )
        if found is None or (rest := found.after(prompt[begins:])) is not None:
            return (None if found is None else rest), ignored
        return None, [*ignored, *(f"{field}: {INTERRUPTED}" for field in found.fields)]

    async def _outcome(self, begun: Begun, stretches: list[PartialGeneration], failure: str | None) -> ReplyOutcome:
        assert begun.applied.max_tokens is not None
        finish = Finish.ERROR if failure is not None else decide_finish(stretches, begun.applied.max_tokens)
        before = begun.resumed.sampled_ids if begun.resumed is not None else NO_IDS
        work = partial(parse_outcome, stretches, finish, begun, before, self._prompts)
        sampled = sum(len(stretch.given.ids) for stretch in stretches)
        return work() if sampled < _INLINE_IDS else await asyncio.to_thread(work)

    async def _recorded(
        self,
        begun: Begun,
        stretches: list[PartialGeneration],
        outcome: ReplyOutcome,
        failure: str | None,
        engine_errors: list[str],
    ) -> Turn:
        prompt, place = begun.prompt, begun.place
        given: dict[str, Any] = (
            {"prompt_messages": place.messages, "prompt_ids": prompt.ids}
            if prompt.after is None
            else {
                "after": prompt.after,
                "new_messages": [] if begun.resumed else place.messages[len(place.messages) - place.new :],
                "new_prompt_ids": prompt.new.ids,
            }
        )
        faithful = all(stretch.engine.token_faithful for stretch in stretches)
        last = stretches[-1].given if stretches else None
        return await begun.session.recorder.record_turn_async(
            finish=outcome.finish,
            **given,
            segments=build_segments(stretches) or None,
            sampled_ids=None if stretches else (),
            side_arrays=join_side_arrays(stretches) or None,
            message_starts=prompt.new.message_starts,
            reply=outcome.message,
            tools=begun.ask.tools,
            template_options=self._prompts.template_options(begun.thinking),
            sampling=begun.applied.to_dict(),
            sampling_asked=begun.ask.sampling.to_dict(),
            logprob_kind=last.logprob_kind if last else None,
            delivery=Delivery.UNKNOWN,
            auxiliary=begun.auxiliary,
            flags=_flags(begun, stretches, outcome),
            token_faithful=faithful,
            error=failure,
            started_at=begun.started_at,
            extra=_extra(begun, stretches, outcome, engine_errors),
        )


def _offered(ask: ChatRequest, session: OpenSession) -> tuple[ChatRequest, list[str]]:
    """A request with the tools that the model may call, and why others are not among them."""
    tools, deferred = (
        [tool for tool in given if session.spec.allows(_name(tool))] for given in (ask.tools or [], ask.deferred_tools)
    )
    withheld = [_name(tool) for tool in ask.all_tools or () if not session.spec.allows(_name(tool))]
    offered = msgspec.structs.replace(ask, tools=tools or None, deferred_tools=deferred)
    return offered, [f"tools: {name} is denied in this session" for name in withheld]


def _name(tool: dict[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _covered(after: Turn | None) -> int:
    """Up to which token side arrays are on the tape already: the engine need not send those again."""
    return min((array.stop for array in after.side.values()), default=0) if after is not None else 0


def _flags(begun: Begun, stretches: list[PartialGeneration], outcome: ReplyOutcome) -> list[TurnFlag]:
    flags = {
        TurnFlag.CONSTRAINED: any(stretch.given.constrained for stretch in stretches),
        TurnFlag.UNMET_DEMAND: outcome.unmet,
        TurnFlag.MALFORMED_CALL: outcome.malformed,
        TurnFlag.DENIED_TOOL: bool(outcome.denied),
        TurnFlag.SPECIAL_TOKEN_TEXT: begun.prompt.new.special_text > 0,
        TurnFlag.REPAIRED_UNICODE: begun.ask.repaired,
        TurnFlag.MEDIA_LEFT_OUT: bool(begun.ask.media),
    }
    return [flag for flag, is_set in flags.items() if is_set]


def _extra(
    begun: Begun, stretches: list[PartialGeneration], outcome: ReplyOutcome, engine_errors: list[str]
) -> dict[str, Any]:
    """What else is known of a turn, absent where there is nothing to say."""
    last = stretches[-1] if stretches else None
    facts = {
        "api": begun.ask.api.value,
        "model_asked": begun.ask.model,
        "metadata": begun.ask.metadata,
        "prompt": begun.prompt.how,
        "prefix_miss": begun.prompt.prefix_miss,
        "echoes": [rule.value for rule in dict.fromkeys(begun.place.echoes)],
        "ignored_params": list(begun.ignored_params),
        "denied": list(outcome.denied),
        "cut_after_call": outcome.kept_ids is not None,
        "engine": last.engine.name if last else None,
        "cached_tokens": last.given.cached_tokens if last else None,
        "engine_errors": engine_errors,  # before the reply came, or it was given up
        "stop_string": outcome.stop_string,
        "folded": bool(begun.prompt.new.folded),
        "special_text": begun.prompt.new.special_text,
        "over_budget": begun.over_budget,
    }
    return {name: fact for name, fact in facts.items() if fact}
