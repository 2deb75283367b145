"""Random sessions: what agents, clients, templates and engines do to a conversation, over a vocabulary of few words.

Few words make conversations meet by accident, which is where a tree goes wrong.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from rolltape.records.policy import PRESETS, Branches, Credit, CutPolicy, LossWeight, OnRewrite, RewardShare
from rolltape.records.rollout import Event, EventKind, Rollout, Status
from rolltape.records.turn import Delivery, Finish, Turn, TurnFlag
from sessions import Dict, Recording, event, held, rollout_of, system, tool, user

Draw = Callable[[st.SearchStrategy[Any]], Any]

# ROLLTAPE_EXAMPLES=5000 searches longer than CI does.
_EXAMPLES = int(os.environ.get("ROLLTAPE_EXAMPLES", "200"))
_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
_PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]
searching = settings(max_examples=_EXAMPLES, deadline=None, suppress_health_check=_SLOW_IS_FINE, phases=_PHASES)

searching_longer = settings(searching, max_examples=3 * _EXAMPLES)

VERSIONS = ("1", "2", "3", "4")
TOOLS = ([{"name": "run"}], [{"name": "run"}, {"name": "ask"}])
TEXTS = st.sampled_from(["a", "b", "a b", "b a", "a  b", "a\nb", ""])
_REPLIES = st.sampled_from(["a", "b a", "a b a", "a b a b"])
SHORT_IDS = st.lists(st.integers(0, 11), max_size=4)


@st.composite
def rollouts(draw: Draw) -> tuple[Rollout, list[Recording]]:
    """A rollout of one or two sessions with what was said of it, and the recordings that it came from."""
    recordings = [draw(recordings_of(ordinal)) for ordinal in range(draw(st.sampled_from([1, 1, 1, 2])))]
    status = draw(st.sampled_from([Status.FINISHED] * 18 + [Status.FAILED, None]))
    reward = draw(st.sampled_from([1.0, 0.0, -0.1, 1 / 3, None]))
    events: list[Event] = []
    if draw(_rarely()):
        reason = draw(st.sampled_from(["a near duplicate", None]))
        events.append(event(10, EventKind.FILTER, {"reason": reason}))
    sessions = [recording.session() for recording in recordings]
    return rollout_of(*sessions, reward=reward, status=status, events=events), recordings


def recordings_of(ordinal: int = 0, max_turns: int = 8) -> st.SearchStrategy[Recording]:
    """One session of either kind below."""
    return eventful_recordings(ordinal, max_turns) | branching_recordings(ordinal, max_turns)


@st.composite
def eventful_recordings(draw: Draw, ordinal: int = 0, max_turns: int = 8) -> Recording:
    """One session in which anything may happen; each turn is one of the moves below."""
    tools = draw(st.sampled_from([None, *TOOLS]))
    recording = Recording(ordinal, tools=tools, tool_ids_matter=draw(_rarely()))
    recording.has_times = draw(_rarely())
    _new_conversation(draw, recording)
    for _ in range(draw(st.integers(0, max_turns - 1))):
        draw(st.sampled_from(_MOVES))(draw, recording)
    return recording


@st.composite
def branching_recordings(draw: Draw, ordinal: int = 0, max_turns: int = 8) -> Recording:
    """One session in which nothing goes wrong but ids and replies: branches meet, share, and depart everywhere."""
    recording = Recording(ordinal)
    recording.ask([user("a")], "a b a b")
    for _ in range(draw(st.integers(1, max_turns - 1))):
        base = recording.turns[draw(st.integers(0, len(recording.turns) - 1))]
        new = [user("c")] if draw(st.booleans()) else []
        conversation = [*held(base), *new]
        ids = base.tokens.to_numpy().tolist()
        move = draw(st.sampled_from(["extend", "depart", "depart", "rewrite", "ask again"]))
        if move == "depart":
            cut = draw(st.integers(max(len(base.prompt_ids) - 2, 0), len(ids) - 1))
            ids = [*ids[:cut], *draw(SHORT_IDS)]
        elif move == "rewrite":
            conversation[len(base.prompt)] = {"role": "assistant", "content": draw(TEXTS)}
            ids = [*ids[: len(base.prompt_ids) + draw(st.integers(0, 2))], *draw(SHORT_IDS)]
        if move == "ask again":
            recording.ask(base.prompt_messages, draw(_REPLIES), prompt_ids=base.prompt_ids)
        else:
            recording.ask(conversation, draw(_REPLIES), prompt_ids=[*ids, *recording.render(new)])
    return recording


def policies() -> st.SearchStrategy[CutPolicy]:
    """Any policy at all: the presets, the presets under limits, and every mixture of choices."""
    limits = {
        "branches": st.sampled_from(list(Branches)),
        "max_sample_tokens": st.none() | st.integers(1, 30),
        "max_staleness": st.none() | st.integers(0, 2),
        "train_abandoned": st.booleans(),
        "train_without_logprobs": st.booleans(),
        "train_constrained": st.booleans(),
    }
    mixed = st.builds(
        CutPolicy,
        name=st.just("mixed"),
        on_rewrite=st.sampled_from(list(OnRewrite)),
        max_given_up_tokens=st.integers(0, 5),
        max_reply_tokens=st.integers(0, 5),
        absorb_rewritten_messages=st.booleans(),
        claim_before_cut=st.booleans(),
        **limits,
    )
    rarely_limited = {name: st.just(getattr(CutPolicy(), name)) | choice for name, choice in limits.items()}
    limited = st.builds(_replaced, st.sampled_from(list(PRESETS.values())), st.fixed_dictionaries(rarely_limited))
    return limited | mixed


def credits_of_samples() -> st.SearchStrategy[Credit]:
    """Any way in which a rollout's reward and weight are shared."""
    return st.builds(
        Credit, reward_share=st.sampled_from(list(RewardShare)), loss_weight=st.sampled_from(list(LossWeight))
    )


def _replaced(preset: CutPolicy, choices: dict[str, Any]) -> CutPolicy:
    return msgspec.structs.replace(preset, name="limited", **choices)


def _new_conversation(draw: Draw, recording: Recording) -> None:
    """The first prompt of a task or of a sub-agent, some of them with a prompt that another one has too."""
    messages = [system(draw(TEXTS))] if draw(st.booleans()) else []
    if draw(_rarely()):  # an example to follow
        messages += [user(draw(TEXTS)), {"role": "assistant", "content": draw(TEXTS)}]
    messages.append(user(draw(TEXTS)))
    given: Dict = {"tools": draw(st.sampled_from(TOOLS))} if draw(_rarely()) else {}
    _ask(draw, recording, messages, **given)


def _extend(draw: Draw, recording: Recording) -> None:
    """Goes on after a turn, given as what is new or as a whole; equal ids either way."""
    base = _earlier(draw, recording)
    if draw(st.booleans()):
        new = _new_messages(draw)
        given = _reply(draw, recording)
        recording.record(after=base, new_messages=new, new_prompt_ids=_glue(draw, recording, base, new), **given)
    else:
        _go_on_whole(draw, recording, base)


def _go_on_whole(draw: Draw, recording: Recording, base: Turn, answered: Dict | None = None) -> None:
    new = _new_messages(draw)
    ids = base.tokens.to_numpy().tolist() + _glue(draw, recording, base, new)
    _ask(draw, recording, _echoed(draw, base) + new, prompt_ids=ids, answered=answered)


def _drift(draw: Draw, recording: Recording) -> None:
    """Equal messages, ids that depart: inside the last reply, before it, in the glue, or short of its end."""
    base = _earlier(draw, recording)
    new = _new_messages(draw)
    ids = base.tokens.to_numpy().tolist()
    prompt, end = len(base.prompt_ids), len(ids)
    where = draw(st.sampled_from(["reply", "reply", "anywhere", "glue", "edge", "short"]))
    if where == "short":
        _ask(draw, recording, _echoed(draw, base) + new, prompt_ids=ids[: draw(st.integers(0, end))])
        return
    bounds = {"reply": (prompt, end), "anywhere": (0, end), "glue": (max(prompt - 1, 0), prompt), "edge": (end, end)}
    cut = draw(st.integers(*bounds[where]))
    swallowed = draw(st.integers(0, 2))
    ids = ids[:cut] + draw(SHORT_IDS) + ids[cut + swallowed :] + recording.render(new)
    _ask(draw, recording, _echoed(draw, base) + new, prompt_ids=ids)


def _hang_up(draw: Draw, recording: Recording) -> None:
    """A reply is cut short or lost, and a part of it comes back: all of it, or with another id in its place."""
    lost = {"finish": Finish.ABORT} if draw(st.booleans()) else {"delivery": Delivery.UNDELIVERED}
    before = _earlier(draw, recording)
    _go_on_whole(draw, recording, before, answered=_reply(draw, recording) | lost)
    base, new = recording.turns[-1], _new_messages(draw)
    part = draw(st.integers(0, len(base.sampled_ids)))
    echo = {"role": "assistant", "content": draw(TEXTS)}
    ids = [*base.prompt_ids.tolist(), *base.sampled_ids[:part].tolist(), *draw(SHORT_IDS), *recording.render(new)]
    _ask(draw, recording, [*base.prompt_messages, echo, *new], prompt_ids=ids)


def _rewrite_reply(draw: Draw, recording: Recording) -> None:
    """A reply comes back changed; its ids are rendered afresh, or its head is kept as it was."""
    base = _earlier(draw, recording)
    conversation = held(base)
    replies = [at for at, message in enumerate(conversation) if message["role"] == "assistant"]
    if not replies:
        return _retry(draw, recording)
    at = draw(st.sampled_from(replies[-2:]))
    conversation[at] = _rewritten(draw, conversation[at])
    conversation += _new_messages(draw)
    ids = recording.render(conversation, base.root.tools)
    if draw(st.booleans()):
        kept = draw(st.integers(0, len(base.tokens)))
        ids = base.tokens.slice(0, kept).tolist() + ids[kept:]
    return _ask(draw, recording, conversation, prompt_ids=ids)


def _rewritten(draw: Draw, message: Dict) -> Dict:
    how = draw(st.sampled_from(["space", "thinking", "arguments", "text", "id"]))
    changed = dict(message)
    if how == "space":
        changed["content"] = f" {message.get('content') or ''}\n"
    elif how == "thinking":
        changed.pop("reasoning_content", None)
    elif how == "arguments" and message.get("tool_calls"):
        call = message["tool_calls"][0]
        arguments = json.loads(call["function"]["arguments"])
        spelled = json.dumps(dict(reversed(arguments.items())), indent=draw(st.sampled_from([None, 1])))
        changed["tool_calls"] = [{**call, "function": {**call["function"], "arguments": spelled}}]
    elif how == "text":
        changed["content"] = draw(TEXTS)
    else:
        changed["id"] = draw(st.sampled_from(["m0", "m1", "other"]))
    return changed


def _retry(draw: Draw, recording: Recording) -> None:
    """The same prompt again; now and then with an equal reply, which makes twins."""
    base = _earlier(draw, recording)
    given = _reply(draw, recording)
    ids = base.prompt_ids.tolist()
    if draw(_rarely()):
        cut = draw(st.integers(0, len(ids)))
        ids = ids[:cut] + draw(SHORT_IDS) + ids[cut:]
    if draw(st.booleans()) and base.reply is not None:
        given["reply"] = base.reply.to_dict()
        if draw(st.booleans()):
            given["reply"]["id"] = f"m{len(recording.turns)}"
        if draw(st.booleans()):
            given |= {"sampled_ids": base.sampled_ids, "logprobs": recording.some_logprobs(len(base.sampled_ids))}
            given.pop("segments", None)
            given.pop("side_arrays", None)
    _ask(draw, recording, base.prompt_messages, prompt_ids=ids, answered=given, tools=base.root.tools or [])


def _without_reply(draw: Draw, recording: Recording) -> None:
    """The agent throws the reply away and says something else."""
    base = _earlier(draw, recording)
    messages = base.prompt_messages + _new_messages(draw)
    _ask(draw, recording, messages)


def _compact(draw: Draw, recording: Recording) -> None:
    base = _earlier(draw, recording)
    messages = [*base.prompt_messages[:1], user(f"so far {draw(TEXTS)}")]
    _ask(draw, recording, messages)


def _edit_history(draw: Draw, recording: Recording) -> None:
    base = _earlier(draw, recording)
    messages = held(base)
    at = draw(st.integers(0, len(messages) - 1)) if messages else 0
    messages[at : at + 1] = [user(draw(TEXTS))] if draw(st.booleans()) else []
    _ask(draw, recording, messages)


def _change_tools(draw: Draw, recording: Recording) -> None:
    base = _earlier(draw, recording)
    if draw(st.booleans()):
        new = _new_messages(draw)
        given = _reply(draw, recording) | {"tools": draw(st.sampled_from(TOOLS))}
        recording.record(after=base, new_messages=new, new_prompt_ids=_glue(draw, recording, base, new), **given)
    else:
        _ask(draw, recording, held(base) + _new_messages(draw), tools=draw(st.sampled_from(TOOLS)))


_MOVES = (
    [_extend] * 6
    + [_drift] * 5
    + [_rewrite_reply] * 3
    + [_hang_up] * 2
    + [_retry] * 3
    + [_change_tools] * 2
    + [_new_conversation, _without_reply, _compact, _edit_history]
)


def _ask(
    draw: Draw,
    recording: Recording,
    messages: list[Dict],
    *,
    prompt_ids: Any = None,
    tools: Any = None,
    answered: Dict | None = None,
) -> None:
    ids = recording.render(messages, tools or recording.intake.root.tools) if prompt_ids is None else prompt_ids
    if draw(_seldom()):
        ids = []
    given = _reply(draw, recording) if answered is None else answered
    if draw(_seldom()):  # only ids are recorded
        messages, given["reply"] = [], None
    recording.record(prompt_messages=messages, prompt_ids=ids, tools=tools, **given)


def _reply(draw: Draw, recording: Recording) -> Dict:
    """The engine's side of a turn, with all the ways in which it may be incomplete."""
    message = _reply_message(draw, recording)
    finish = draw(st.sampled_from([Finish.STOP] * 12 + list(Finish)))
    ids = draw(SHORT_IDS) if draw(_rarely()) else recording.body(message) + [0] * (finish is Finish.STOP)
    given: Dict = {"reply": message, "finish": finish}
    if finish in (Finish.ABORT, Finish.ERROR) and draw(st.booleans()):
        given["reply"] = None
    pieces = [ids]
    if draw(_rarely()):
        cuts = sorted(draw(st.lists(st.integers(0, len(ids)), min_size=1, max_size=2)))
        pieces = [ids[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    given["segments"] = [_segment(draw, recording, piece) for piece in pieces]
    if draw(_rarely()):
        given["delivery"] = draw(st.sampled_from(list(Delivery)))
    if draw(_seldom()):
        given["auxiliary"] = "a title"
    if draw(_seldom()):
        given["flags"] = [draw(st.sampled_from([TurnFlag.NOT_TOKEN_FAITHFUL, TurnFlag.MALFORMED_CALL]))]
    if draw(_seldom()):
        given["reward"] = 0.5
    if draw(_seldom()):
        given["model"] = "another"
    if draw(_seldom()):
        given["sampling"] = {"regex": "[ab]"}
    if recording.has_times:
        given |= {
            "started_at": len(recording.turns) - draw(st.sampled_from([0.5, 0.5, 1.0, 1.5])),
            "ended_at": len(recording.turns) + draw(st.sampled_from([0, 0.25])),
        }
    if draw(_seldom()):
        rows = [[token, len(recording.turns)] for token in ids]
        given["side_arrays"] = {"experts": np.array(rows, np.int16).reshape(-1, 2)}
    return given


def _segment(draw: Draw, recording: Recording, ids: list[int]) -> Dict:
    versions = draw(st.sampled_from(["1", "1", "2", "3", "unannounced", ("1", "2"), ("2", "4"), None]))
    logprobs: list[float | None] | None = list(recording.some_logprobs(len(ids)))
    assert logprobs is not None
    given = draw(st.sampled_from(["all"] * 6 + ["few values", "some", "none"]))
    if given == "few values":
        logprobs = [draw(st.sampled_from([-0.5, -0.25, 0.0, -0.0, float("-inf")])) for _ in ids]
    elif given == "some":
        logprobs = [draw(st.sampled_from([logprob, None, float("nan")])) for logprob in logprobs]
    return {"sampled_ids": ids, "logprobs": None if given == "none" else logprobs, "weight_version": versions}


def _reply_message(draw: Draw, recording: Recording) -> Dict:
    message: Dict = {"role": "assistant", "content": draw(TEXTS)}
    if draw(_rarely()):
        message["reasoning_content"] = draw(TEXTS)
    if draw(_rarely()):
        arguments = draw(st.sampled_from(['{"x": 1, "y": 2}', '{"y":2,"x":1.0}', "{}"]))
        message["tool_calls"] = [
            {"id": f"call{len(recording.turns)}", "function": {"name": "run", "arguments": arguments}}
        ]
    if draw(st.booleans()):
        message["id"] = f"m{len(recording.turns)}"
    return message


def _echoed(draw: Draw, base: Turn) -> list[Dict]:
    """The conversation as a client sends it back: with the ids that it was given, or without."""
    messages = held(base)
    if draw(st.booleans()):
        return messages
    stripped = [{key: value for key, value in message.items() if key != "id"} for message in messages]
    for message in stripped:
        if message.get("tool_calls"):
            message["tool_calls"] = [{"function": call["function"]} for call in message["tool_calls"]]
    return stripped


def _earlier(draw: Draw, recording: Recording) -> Turn:
    latest = len(recording.turns) - 1
    return recording.turns[latest if draw(st.integers(0, 2)) else draw(st.integers(0, latest))]


def _new_messages(draw: Draw) -> list[Dict]:
    roles = draw(st.lists(st.sampled_from([user, tool, system]), max_size=2))
    return [role(draw(TEXTS)) for role in roles]


def _glue(draw: Draw, recording: Recording, base: Turn, new: list[Dict]) -> list[int]:
    ids: list[int] = draw(SHORT_IDS) if draw(_rarely()) else recording.bridge(base, new)
    return ids


def _rarely() -> st.SearchStrategy[bool]:
    return st.integers(0, 5).map(lambda drawn: drawn == 5)


def _seldom() -> st.SearchStrategy[bool]:
    return st.integers(0, 24).map(lambda drawn: drawn == 24)
