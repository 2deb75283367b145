"""Sessions as agents make them, recorded in memory over a toy chat template of one token per word."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rolltape.records.messages import Message
from rolltape.records.rollout import Event, EventKind, Rollout, RolloutHead, Session, SessionHead, Status
from rolltape.records.turn import Finish, Turn
from rolltape.tape.recording.intake import SessionIntake

Dict = dict[str, Any]


class Words:
    """A toy tokenizer: one id per word, given in the order in which words are first seen."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        for special in ("<eot>", "<system>", "<user>", "<gen>", "<tool>", "<think>", "</think>", "<tools>", "<call>"):
            self.id(special)

    def id(self, word: str) -> int:
        return self._ids.setdefault(word, len(self._ids))

    def ids(self, text: str) -> list[int]:
        # White space is a token of its own where it is not a single blank, so that a changed space shows.
        words = text.replace("\n", " \\n ").replace("  ", " \\s ").split(" ")
        return [self.id(word) for word in words if word]

    def word(self, token: int) -> str:
        words = list(self._ids)
        return words[token] if token < len(words) else f"<{token}>"


class Recording:
    """One session being recorded: turns are rendered by the toy template and taken in memory."""

    def __init__(
        self,
        ordinal: int = 0,
        *,
        rollout: str = "r",
        tools: Sequence[Mapping[str, Any]] | None = None,
        words: Words | None = None,
        tool_ids_matter: bool = False,
        stop_ids: tuple[int, ...] | None = (0,),
    ) -> None:
        self.words = words or Words()
        self.head = SessionHead(
            id=f"{rollout}.0.{ordinal}", ordinal=ordinal, tool_ids_matter=tool_ids_matter, stop_ids=stop_ids
        )
        self.intake = SessionIntake(self.head, tools=tools, model="toy", renderer="words")
        self._logprobs_given = 0
        self.has_times = False  # whether turns say when they started and ended

    @property
    def turns(self) -> list[Turn]:
        return self.intake.turns

    def record(self, **given: Any) -> Turn:
        """Take one turn exactly as given."""
        return self.intake.accept(self.intake.code(**{"ended_at": 0.0, **given}))

    def ask(self, messages: Sequence[Dict], reply: str | Dict, /, **given: Any) -> Turn:
        """A turn with its whole prompt, rendered afresh as a stateless engine would."""
        tools = given.get("tools") or self.intake.root.tools
        return self.record(
            prompt_messages=messages,
            prompt_ids=given.pop("prompt_ids", self.render(messages, tools)),
            **self.answered(reply, **given),
        )

    def go_on(self, after: Turn, messages: Sequence[Dict], reply: str | Dict, /, **given: Any) -> Turn:
        """A turn given as what is new after an earlier one."""
        new_ids = given.pop("new_prompt_ids", self.bridge(after, messages))
        return self.record(after=after, new_messages=messages, new_prompt_ids=new_ids, **self.answered(reply, **given))

    def answered(self, reply: str | Dict, /, **given: Any) -> Dict:
        """The reply's side of a turn: its ids, a distinct logprob for each, and the engine's facts."""
        message = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
        fields: Dict = {"reply": message, "finish": Finish.STOP, "weight_version": "1", **given}
        if "segments" in fields:
            del fields["weight_version"]
            return fields
        if "sampled_ids" not in fields:
            fields["sampled_ids"] = self.body(message) + [0] * (fields["finish"] == Finish.STOP)
        if "logprobs" not in fields:
            fields["logprobs"] = self.some_logprobs(len(fields["sampled_ids"]))
        return fields

    def some_logprobs(self, count: int) -> list[float]:
        """Logprobs that no other token of the session has; most of them need all of a float64."""
        start = self._logprobs_given
        self._logprobs_given += count
        return [-(start + index + 1) / 7 for index in range(count)]

    def render(self, messages: Sequence[Dict], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """The ids of a whole prompt, ready for the reply."""
        ids = [self.words.id("<tools>")] + [self.words.id(f"{tool['name']}()") for tool in tools] if tools else []
        for message in messages:
            ids += self._opened(message) + self.body(message) + [0]
        return [*ids, self.words.id("<gen>")]

    def bridge(self, after: Turn, messages: Sequence[Dict]) -> list[int]:
        """What follows a turn's ids before the next reply; closes a reply that did not stop by itself."""
        closed = len(after.sampled_ids) and int(after.sampled_ids[-1]) == 0
        return [] if not messages and not closed else ([] if closed else [0]) + self.render(messages)

    def body(self, message: Dict) -> list[int]:
        """The ids of what a message says, without its frame."""
        ids: list[int] = []
        if message.get("reasoning_content"):
            ids += [self.words.id("<think>"), *self.words.ids(message["reasoning_content"]), self.words.id("</think>")]
        ids += self.words.ids(message.get("content") or "")
        for call in message.get("tool_calls") or ():
            function = call["function"]
            ids += [self.words.id("<call>"), *self.words.ids(f"{function['name']} {function['arguments']}")]
        return ids

    def _opened(self, message: Dict) -> list[int]:
        role = {"assistant": "gen", "developer": "system"}.get(message["role"], message["role"])
        return [self.words.id(f"<{role}>")]

    def __repr__(self) -> str:
        return "\n".join(["", *map(self._line, self.turns)])

    def _line(self, turn: Turn) -> str:
        """A turn as one line: ids as words, what was sampled in brackets, and what is odd about it."""
        prompt = " ".join(map(self.words.word, turn.prompt_ids.tolist()))
        sampled = " ".join(map(self.words.word, turn.sampled_ids.tolist()))
        facts = turn.facts
        odd = [facts.finish, facts.delivery, *facts.flags, *(["auxiliary"] if facts.auxiliary else [])]
        odd += [f"by {facts.model}", *(f"with {one['name']}" for one in turn.root.tools or ())]
        odd += [] if facts.started_at is None else [f"at {facts.started_at}-{facts.ended_at}"]
        asked = "".join(message["role"][0] for message in turn.prompt_messages)
        reply = turn.reply.raw.decode() if turn.reply else "no reply"
        return f"{turn.sequence} {asked}: {prompt} «{sampled}» {' '.join(odd)}, {reply}"

    def session(self) -> Session:
        return Session(self.head, self.turns)

    def given_whole(self) -> Session:
        """The same turns recorded again, each with its whole prompt: other storage, the same meaning."""
        again = SessionIntake(self.head)
        for turn in self.turns:
            again.accept(again.code(**whole(turn)))
        return Session(self.head, again.turns)


def whole(turn: Turn) -> Dict:
    """What to record to get an equal turn from its whole prompt."""
    facts = turn.facts
    segments = [
        {
            "sampled_ids": turn.sampled_ids[part.start : part.stop],
            "logprobs": None if turn.logprobs is None else turn.logprobs[part.start : part.stop],
            "weight_version": None if part.first_version is None else (part.first_version, part.last_version),
        }
        for part in facts.segments
    ]
    return {
        "prompt_messages": [Message.stored(message.raw) for message in turn.prompt.to_list()],
        "prompt_ids": np.array(turn.prompt_ids),
        "segments": segments,
        "reply": None if turn.reply is None else turn.reply.to_dict(),
        "finish": facts.finish,
        "tools": turn.root.tools,
        "template_options": turn.root.template_options,
        "side_arrays": dict(turn.side),
        "reward": facts.reward,
        "delivery": facts.delivery,
        "auxiliary": facts.auxiliary,
        "flags": facts.flags,
        "error": facts.error,
        "model": facts.model,
        "renderer": facts.renderer,
        "fingerprint": facts.fingerprint,
        "sampling": facts.sampling,
        "started_at": facts.started_at,
        "ended_at": facts.ended_at,
    }


def rollout_of(
    *sessions: Session,
    reward: float | None = 1.0,
    status: Status | None = Status.FINISHED,
    events: Sequence[Event] = (),
    rollout: str = "r",
) -> Rollout:
    """A rollout that holds these sessions; `status` None leaves it unfinished, its writer gone."""
    head = RolloutHead(
        id=rollout, try_index=0, group="g", run="run", step=3, attempt=0, task_id="task", started_at_ns=0
    )
    said: list[Event] = []
    if status is not None:
        said.append(event(len(said), EventKind.FINISH, {"status": status.value}, rollout=rollout))
    if reward is not None:
        said.append(event(len(said), EventKind.SCORE, {"reward": reward, "terms": {}}, rollout=rollout))
    return Rollout(head, sessions, [*said, *events], writer_alive=False)


def event(order: int, kind: EventKind, data: Dict, *, turn: str | None = None, rollout: str = "r") -> Event:
    """One statement about a rollout, or about a turn of it."""
    return Event("writer", order, order, kind, rollout, 0, turn, None, data)


def user(text: str) -> Dict:
    return {"role": "user", "content": text}


def system(text: str) -> Dict:
    return {"role": "system", "content": text}


def tool(text: str, call: str | None = None) -> Dict:
    return {"role": "tool", "content": text} | ({} if call is None else {"tool_call_id": call})


def says(turn: Turn) -> Dict:
    """A turn's reply as a client would echo it."""
    assert turn.reply is not None
    return turn.reply.to_dict()


def held(turn: Turn) -> list[Dict]:
    """The conversation after a turn, reply included."""
    return turn.prompt_messages + ([says(turn)] if turn.reply else [])
