"""An engine that replays the turns of a recorded rollout or session; a prompt that departs from them is an error."""

import os
from typing import Any

import msgspec

from rolltape.errors import EngineError, EngineFault, NoSuchRollout
from rolltape.gateway.engines.protocol import EngineFacts, Generated, Generation
from rolltape.gateway.request import SamplingParams
from rolltape.gateway.turn.constraints import Ability
from rolltape.records.messages import Message
from rolltape.records.turn import Finish, Ids, Turn, TurnFlag, common_length, common_prefix
from rolltape.tape.run import read


def open_replay(place: str) -> "ReplayEngine":
    """An engine for `RUN#ROLLOUT` or `RUN#SESSION`."""
    run, _, which = place.rpartition("#")
    if not run or not which:
        raise EngineError(f"replay:{place} names nothing to replay; write replay:RUN#ROLLOUT or RUN#SESSION")
    return ReplayEngine(run, which)


class ReplayEngine:
    """Answers each request with the recorded turn of the same prompt, equal turns in their order.

    `which` is the id of a rollout (its latest try) or of a session.
    """

    applies = frozenset(SamplingParams.__struct_fields__)  # a recorded turn had its own parameters
    abilities = frozenset(Ability)  # a recorded turn has its own constraint flag
    streams = False

    def __init__(self, run: str | os.PathLike[str], which: str) -> None:
        self.name = f"replay {os.fspath(run)}#{which}"
        # A failed turn has no reply. If its client retried, the turn of the retry follows.
        self._left = [turn for turn in _turns(run, which) if turn.facts.finish is not Finish.ERROR]
        if not self._left:
            raise NoSuchRollout(f"{self.name}: no turns are recorded there")
        self._model = self._left[0].facts.model
        self.token_faithful = all(_has_ids(turn) for turn in self._left)
        self._requests = 0

    async def facts(self) -> EngineFacts:
        return EngineFacts(model=self._model)

    async def generate(self, wanted: Generation) -> Generated:
        number, self._requests = self._requests, self._requests + 1
        turn = self._recorded(wanted)
        if turn is None:
            raise EngineFault(f"{self.name}: {_departure(self._nearest(wanted), wanted, number)}")
        self._left.remove(turn)
        return _generated(turn)

    async def abort(self, generation_id: str) -> None:
        pass

    async def close(self) -> None:
        pass

    def _recorded(self, wanted: Generation) -> Turn | None:
        """The first remaining turn whose prompt has these ids, or, without ids to compare, these messages."""
        ids = wanted.prompt_ids
        for turn in self._left:
            if len(ids) and len(turn.prompt_tokens) == len(ids) and (turn.prompt_ids == ids).all():
                return turn
        requested = _digests(wanted)
        for turn in self._left:
            if not (len(ids) and _has_ids(turn)) and _recorded_digests(turn) == requested:
                return turn
        return None

    def _nearest(self, wanted: Generation) -> Turn | None:
        """The remaining turn that shares the most with the request; of equals the first."""
        requested = _digests(wanted)

        def shared(turn: Turn) -> tuple[int, int]:
            messages = common_length(_recorded_digests(turn), requested)
            return messages, common_prefix(turn.prompt_ids, wanted.prompt_ids)

        return max(self._left, key=shared, default=None)


def _turns(run: str | os.PathLike[str], which: str) -> list[Turn]:
    rollout_id, _, rest = which.partition(".")
    if not rest:
        return read(run).rollout(which).turns
    try_text, _, _ = rest.partition(".")
    if not try_text.isdigit():
        raise NoSuchRollout(f"{which!r} is neither a rollout's id nor a session's, which is ROLLOUT.TRY.ORDINAL")
    rollout = read(run).rollout(rollout_id, int(try_text))
    session = next((one for one in rollout.sessions if one.id == f"{rollout.id}.{rest}"), None)
    if session is None:
        known = ", ".join(one.id for one in rollout.sessions)
        raise NoSuchRollout(f"{os.fspath(run)} holds no session {which!r}; the rollout has {known or 'none'}")
    return list(session.turns)


def _has_ids(turn: Turn) -> bool:
    return TurnFlag.NOT_TOKEN_FAITHFUL not in turn.facts.flags


def _digests(wanted: Generation) -> list[bytes]:
    return [Message.snapshot(message, f"message {at}").canonical for at, message in enumerate(wanted.request.messages)]


def _recorded_digests(turn: Turn) -> list[bytes]:
    return [message.canonical for message in turn.prompt.to_list()]


def _departure(turn: Turn | None, wanted: Generation, number: int) -> str:
    """How a request differs from the recorded turn that is nearest to it; None: all turns were used up."""
    if turn is None:
        return f"request {number} comes after the last recorded turn"
    recorded_messages, requested = _recorded_digests(turn), _digests(wanted)
    message = common_length(recorded_messages, requested)
    where = []
    if not message == len(recorded_messages) == len(requested):
        where.append(f"message {message}: {_shown(turn, wanted, message)}")
    token = common_prefix(turn.prompt_ids, wanted.prompt_ids)
    comparable = _has_ids(turn) and len(wanted.prompt_ids)
    if comparable and not token == len(turn.prompt_ids) == len(wanted.prompt_ids):
        recorded, came = _id_at(turn.prompt_ids, token), _id_at(wanted.prompt_ids, token)
        where.append(f"token {token}: {recorded} was recorded, but the request has {came}")
    return f"request {number} departs from turn {turn.id} at " + "; ".join(where)


def _shown(turn: Turn, wanted: Generation, at: int) -> str:
    both = (turn.prompt_messages, wanted.request.messages)
    recorded, came = (_short(messages[at]) if at < len(messages) else "none" for messages in both)
    return f"{recorded} was recorded, but the request has {came}"


def _short(message: dict[str, Any]) -> str:
    text = msgspec.json.encode(message).decode()
    return text if len(text) <= 120 else text[:119] + "…"


def _id_at(ids: Ids, at: int) -> str:
    return str(int(ids[at])) if at < len(ids) else "the end"


def _generated(turn: Turn) -> Generated:
    facts = turn.facts
    faithful = _has_ids(turn)
    stop_string = facts.extra.get("stop_string")
    return Generated(
        ids=turn.sampled_ids,
        logprobs=turn.logprobs,
        finish=facts.finish,
        stop_string=stop_string if facts.finish is Finish.STOP_STRING else None,
        first_version=facts.segments[0].first_version if facts.segments else None,
        last_version=facts.segments[-1].last_version if facts.segments else None,
        segments=facts.segments if len(facts.segments) > 1 else (),
        logprob_kind=facts.logprob_kind,
        side_arrays=dict(turn.side),
        constrained=facts.is_constrained,
        message=None if faithful or turn.reply is None else turn.reply.to_dict(),
    )
