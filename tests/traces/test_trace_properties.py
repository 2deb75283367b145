"""Whatever conversations an environment holds, they read back whole and are stored once."""

import copy
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from environments import trace_at, traced
from rolltape.records.rollout import Rollout
from rolltape.traces import trace_of
from rolltape.traces.values import Conversations
from rolltape.traces.verify import find_problems
from sessions import Recording
from strategies import rollouts, searching

MESSAGES = st.builds(
    lambda role, content, number: {"role": role, "content": content} | ({} if number is None else {"number": number}),
    st.sampled_from(["user", "assistant", "environment"]),
    st.sampled_from(["a", "b"]),
    st.sampled_from([None, 1, 1.0, True, float("nan")]),
)
MOVES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 6), st.lists(MESSAGES, max_size=3), st.none() | MESSAGES), max_size=12
)


def conversations_of(moves: list[tuple[int, int, list[Any], Any]]) -> list[tuple[list[Any], Any]]:
    """Prompts and responses: each move goes on from a beginning of some conversation before it."""
    held: list[list[Any]] = [[]]
    made = []
    for base, keep, new, response in moves:
        prompt = [*held[base % len(held)][:keep], *new]
        made.append((prompt, response))
        held.append(prompt if response is None else [*prompt, response])
    return made


@searching
@given(MOVES)
def test_every_prompt_reads_back_whole(moves: list[tuple[int, int, list[Any], Any]]) -> None:
    made = conversations_of(moves)
    with tempfile.TemporaryDirectory() as folder:
        with traced(Path(folder) / "run") as (_, writer):
            for prompt, response in made:
                given_prompt = copy.deepcopy(prompt)
                writer.step(prompt=given_prompt, policy_response=response)
                given_prompt.append("mutated")
        trace = trace_at(Path(folder) / "run")
    assert [repr(trace.whole_prompt(step.index)) for step in trace.steps] == [repr(prompt) for prompt, _ in made]
    assert [repr(step.policy_response) for step in trace.steps] == [repr(response) for _, response in made]


@searching
@given(MOVES)
def test_each_beginning_of_a_conversation_is_stored_once(moves: list[tuple[int, int, list[Any], Any]]) -> None:
    known = Conversations()
    stored = 0
    beginnings: set[str] = set()
    for step, (prompt, response) in enumerate(conversations_of(moves)):
        placed = known.place(prompt, "")
        stored += len(placed.new)
        known.add(step, placed, response, "")
        beginnings |= {repr(prompt[:count]) for count in range(1, len(prompt) + 1)}
    assert stored <= len(beginnings)


@searching
@given(rollouts())
def test_a_derived_trace_has_the_prompts_and_replies_of_its_turns(made: tuple[Rollout, list[Recording]]) -> None:
    rollout, _ = made
    turns = {turn.id: turn for turn in rollout.turns}
    trace = trace_of(rollout)
    for step in trace.steps:
        (turn,) = step.turns
        assert trace.whole_prompt(step.index) == turns[turn].prompt_messages
        reply = turns[turn].reply
        assert step.policy_response == (None if reply is None else reply.to_dict())
    assert {step.turns[0].rpartition(".")[0] for step in trace.steps} <= {session.id for session in rollout.sessions}
    assert (trace.total_reward, trace.status, trace.filtered) == (
        rollout.reward,
        rollout.status,
        rollout.outcome.filtered,
    )
    assert find_problems(rollout) == []
    if trace.total_reward is not None:
        assert trace.final_reward == trace.total_reward
