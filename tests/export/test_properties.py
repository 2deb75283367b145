"""Whatever was recorded, an export of it reads back as it was, and gives the same samples."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from exported import ROLLOUT_WRITERS, SAMPLE_WRITERS, TURN_WRITERS, comparable, turn_facts
from rolltape.export import read_rollouts, read_samples
from rolltape.records.policy import PRESETS
from rolltape.records.rollout import Rollout
from rolltape.samples import linearize
from sessions import Recording
from strategies import rollouts, searching


@settings(searching, max_examples=100)
@given(rollouts(), st.sampled_from(["jsonl", "parquet"]), st.booleans())
def test_random_rollouts_read_back_equal(
    made: tuple[Rollout, list[Recording]], suffix: str, whole_prompts: bool
) -> None:
    rollout, _ = made
    with tempfile.TemporaryDirectory() as folder:
        names = {what: Path(folder) / f"{what}.{suffix}" for what in ("turns", "rollouts", "samples")}
        TURN_WRITERS[suffix]([rollout], names["turns"], whole_prompts=whole_prompts)
        ROLLOUT_WRITERS[suffix]([rollout], names["rollouts"])
        (back,) = read_rollouts(names["rollouts"], names["turns"])
        assert [turn_facts(turn) for turn in back.turns] == [turn_facts(turn) for turn in rollout.turns]
        for policy in PRESETS.values():
            samples = list(linearize(rollout, policy).samples())
            SAMPLE_WRITERS[suffix](samples, names["samples"])
            expected = [comparable(sample) for sample in samples]
            assert [comparable(sample) for sample in read_samples(names["samples"])] == expected
            assert [comparable(sample) for sample in linearize(back, policy).samples()] == expected
