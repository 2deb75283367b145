"""A recorded rollout given again: the same ids, and an exact word on where a request departs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rolltape
from rolltape.doctor.engine.probing import generation
from rolltape.errors import EngineFault, NoSuchRollout
from rolltape.gateway.engines.protocol import Engine
from rolltape.gateway.engines.replay import ReplayEngine
from rolltape.records.turn import Finish, LogprobKind, Segment
from taped import assistant, user

HELLO = [user("hello")]
GO_ON = [*HELLO, assistant("hi"), user("go on")]


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, str]:
    """Two turns, the second of two weight versions; and another first turn under the same prompt."""
    with rolltape.open(tmp_path / "run", name="run") as tape, tape.rollout(task_id="t") as rollout:
        session = rollout.session(logprob_kind="raw")
        first = session.record_turn(
            finish="stop",
            prompt_messages=HELLO,
            prompt_ids=[1, 2, 3],
            sampled_ids=[4, 5],
            logprobs=[-0.5, -0.25],
            reply=assistant("hi"),
            weight_version="7",
            side_arrays={"experts": np.arange(4).reshape(2, 2)},
        )
        session.record_turn(
            finish="stop",
            prompt_messages=HELLO,
            prompt_ids=[1, 2, 3],
            sampled_ids=[6],
            logprobs=[-0.125],
            reply=assistant("hey"),
            weight_version="7",
        )
        session.record_turn(
            finish="stop_string",
            after=first,
            new_messages=[user("go on")],
            new_prompt_ids=[9],
            segments=[
                {"sampled_ids": [10], "logprobs": [-0.1], "weight_version": "7"},
                {"sampled_ids": [11], "logprobs": [-0.2], "weight_version": "8"},
            ],
            reply=assistant("done"),
            extra={"stop_string": "END"},
        )
        rollout.finish(reward=1.0)
        return tmp_path / "run", rollout.id


def asked(prompt_ids: list[int], messages: list[dict[str, Any]]) -> Any:
    return generation(prompt_ids, messages=messages)


async def test_the_same_requests_get_the_same_replies_in_order(recorded: tuple[Path, str]) -> None:
    engine: Engine = ReplayEngine(*recorded)
    first = await engine.generate(asked([1, 2, 3], HELLO))
    later = await engine.generate(asked([1, 2, 3, 4, 5, 9], GO_ON))
    twin = await engine.generate(asked([1, 2, 3], HELLO))
    assert (first.ids.tolist(), later.ids.tolist(), twin.ids.tolist()) == ([4, 5], [10, 11], [6])
    assert first.logprobs is not None
    assert first.logprobs.tolist() == [-0.5, -0.25]
    assert (first.first_version, first.last_version, first.logprob_kind) == ("7", "7", LogprobKind.RAW)
    assert first.side_arrays["experts"].values.tolist() == [[0, 1], [2, 3]]
    assert (later.finish, later.stop_string) == (Finish.STOP_STRING, "END")
    assert later.segments == (Segment(0, 1, "7", "7"), Segment(1, 2, "8", "8"))
    assert engine.token_faithful
    with pytest.raises(EngineFault, match="request 3 comes after the last recorded turn"):
        await engine.generate(asked([1], HELLO))


async def test_a_departure_is_told_by_message_and_token(recorded: tuple[Path, str]) -> None:
    engine = ReplayEngine(*recorded)
    await engine.generate(asked([1, 2, 3], HELLO))
    changed = [*HELLO, assistant("hi"), user("stop")]
    with pytest.raises(
        EngineFault, match=r"request 1 departs from turn .*\.0\.2 at message 2: .*go on.*stop.*; token 5: 9 was"
    ):
        await engine.generate(asked([1, 2, 3, 4, 5, 8], changed))


async def test_equal_messages_under_other_ids_are_a_departure_too(recorded: tuple[Path, str]) -> None:
    engine = ReplayEngine(*recorded)
    with pytest.raises(EngineFault, match=r"\.0 at token 2: 3 was recorded, but the request has 77"):
        await engine.generate(asked([1, 2, 77], HELLO))


async def test_text_alone_is_matched_by_its_messages(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="run") as tape, tape.rollout(task_id="t") as rollout:
        rollout.session().record_turn(finish="stop", prompt_messages=HELLO, reply=assistant("hi"), token_faithful=False)
        rollout.finish()
    engine = ReplayEngine(tmp_path / "run", rollout.id)
    given = await engine.generate(asked([], [{"content": "hello", "role": "user"}]))
    assert not engine.token_faithful
    assert (given.message, len(given.ids)) == (assistant("hi"), 0)


def test_a_session_can_be_named_and_what_is_not_there_is_told(recorded: tuple[Path, str]) -> None:
    run, rollout = recorded
    assert ReplayEngine(run, f"{rollout}.0.0").name.endswith(f"#{rollout}.0.0")
    with pytest.raises(NoSuchRollout, match="holds no session"):
        ReplayEngine(run, f"{rollout}.0.7")
    with pytest.raises(NoSuchRollout, match=r"ROLLOUT\.TRY\.ORDINAL"):
        ReplayEngine(run, f"{rollout}.x")
    with pytest.raises(NoSuchRollout):
        ReplayEngine(run, "nothing")
