"""Files that release 0.1.0 exported still read, from both formats alike."""

import math
from pathlib import Path

import numpy as np
import pytest

from exported import FORMATS, comparable, turn_facts
from rolltape.export import read_rollouts, read_samples, read_traces, read_turns
from rolltape.records.sample import Fate
from rolltape.records.turn import LogprobKind

OLD = Path(__file__).parent / "exports_0_1_0"


@pytest.mark.parametrize("form", FORMATS)
def test_samples_of_0_1_0_read(form: str) -> None:
    first, _, odd = read_samples(OLD / f"samples.{form}")
    assert first.id.endswith(".0.0.1@exact-f85863f1")
    assert first.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert first.trained_mask.tolist() == [False, False, True, True, False, True, False]
    assert first.logprobs.dtype == np.float32
    assert first.logprobs[2] == np.float32(-0.1)
    assert first.versions == (("7", "7"), ("8", "8"))
    assert math.isinf(first.turn_rewards[first.spans[-1].turn])
    assert first.side["routed_experts"].values[:4].tolist() == np.arange(16).reshape(4, 2, 2).tolist()
    assert first.side["routed_experts"].missing == ((4, 7),)
    assert odd.logprobs.dtype == np.float32
    assert math.isnan(odd.reward if odd.reward is not None else 0)


@pytest.mark.parametrize("form", FORMATS)
def test_the_one_logprob_kind_of_0_1_0_is_that_of_trained_spans(form: str) -> None:
    first, _, odd = read_samples(OLD / f"samples.{form}")
    assert (first.logprob_kind, odd.logprob_kind) == (LogprobKind.AFTER_TEMPERATURE, LogprobKind.RAW)
    for span in first.spans:
        trained = span.fate is Fate.TRAINED
        assert span.logprob_kind is (LogprobKind.AFTER_TEMPERATURE if trained else None)
        assert span.temperature is None


def test_both_formats_of_0_1_0_read_alike() -> None:
    lines, columns = ([comparable(one) for one in read_samples(OLD / f"samples.{form}")] for form in FORMATS)
    assert lines == columns
    turns, others = ([turn_facts(one) for one in read_turns(OLD / f"turns.{form}")] for form in FORMATS)
    assert turns == others
    assert len(turns) == 4


@pytest.mark.parametrize("form", FORMATS)
def test_rollouts_turns_and_traces_of_0_1_0_read(form: str) -> None:
    rollouts = list(read_rollouts(OLD / f"rollouts.{form}", turns=OLD / f"turns.{form}"))
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0]
    for rollout in rollouts:
        assert rollout.outcome.reward_terms == {"x": -math.inf}
        assert math.isnan(rollout.head.task["x"])
        assert rollout.head.tags == ("a",)
        assert [turn.temperature for turn in rollout.turns] == [0.5, None]
        assert rollout.turns[1].prompt_ids.tolist() == [1, 2, 3, 4, 5]
    assert [trace.total_reward for trace in read_traces(OLD / "traces.jsonl")] == [0.0, 1.0]
