"""Whatever was recorded: in every framework's format each trained token stands where it stood, with its own logprob."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rolltape.export.formats import areal, prime_rl, skyrl, slime, tinker, trl, verl
from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Sample
from rolltape.samples import linearize
from sessions import Recording
from strategies import VERSIONS, policies, rollouts, searching

# For one sample: all its ids, and of each trained token the place and the logprob.
Read = tuple[list[int], dict[int, float]]


def marked(ids: Any, mask: Any, logprobs: Any, start: int = 0) -> Read:
    """What columns say that begin at `start` of the ids."""
    return list(ids), {start + at: logprobs[at] for at, trained in enumerate(mask) if trained}


def recorded(sample: Sample) -> Read:
    return marked(sample.ids.tolist(), sample.trained_mask, sample.logprobs.astype(np.float32).tolist())


def from_slime(samples: list[Sample]) -> list[Read]:
    return [
        marked(
            row["tokens"],
            row["loss_mask"],
            np.float32(row["rollout_log_probs"]).tolist(),
            len(row["tokens"]) - row["response_length"],
        )
        for row in slime.rows(samples)
    ]


def from_verl(samples: list[Sample]) -> list[Read]:
    batch = verl.arrays(samples, pad_id=-1)
    found = []
    for row in range(len(samples)):
        here = batch["attention_mask"][row] == 1
        prompt = int(here[: batch["prompts"].shape[1]].sum())
        mask, logprobs = batch["response_mask"][row], batch["rollout_log_probs"][row]
        found.append(marked(batch["input_ids"][row][here].tolist(), mask, logprobs.tolist(), prompt))
    return found


def from_prime_rl(samples: list[Sample]) -> list[Read]:
    rows = [prime_rl.row(sample, "env", 1.0) for sample in samples]
    return [marked(row["token_ids"], row["mask"], np.float32(row["logprobs"]).tolist()) for row in rows]


def from_areal(samples: list[Sample]) -> list[Read]:
    batch = areal.arrays(samples, (*VERSIONS, "unannounced"))
    found = []
    for row, (sample, length) in enumerate(zip(samples, batch["attention_mask"].sum(1), strict=True)):
        ids = [
            *batch["input_ids"][row][:length].tolist(),
            *sample.ids[length:].tolist(),
        ]  # it ends where nothing trains
        found.append(marked(ids, batch["loss_mask"][row], batch["logprobs"][row].tolist()))
    return found


def from_trl(samples: list[Sample]) -> list[Read]:
    rows = [trl.row(sample) for sample in samples]
    return [
        marked(
            row["prompt_ids"] + row["completion_ids"],
            row["env_mask"],
            np.float32(row["logprobs"]).tolist(),
            len(row["prompt_ids"]),
        )
        for row in rows
    ]


def from_tinker(samples: list[Sample]) -> list[Read]:
    found = []
    for row in (tinker.row(sample, mask=True) for sample in samples):
        columns = {name: tensor["data"] for name, tensor in row["loss_fn_inputs"].items()}
        (chunk,) = row["model_input"]["chunks"]
        ids = [*chunk["tokens"], columns["target_tokens"][-1]]
        assert columns["target_tokens"] == ids[1:]
        assert [advantage != 0 for advantage in columns["advantages"]] == [mask != 0 for mask in columns["mask"]]
        found.append(marked(ids, columns["mask"], columns["logprobs"], 1))
    return found


def from_skyrl(samples: list[Sample]) -> list[Read]:
    return [
        marked(
            row["prompt_token_ids"] + row["response_ids"],
            row["loss_mask"],
            np.float32(row["rollout_logprobs"]).tolist(),
            len(row["prompt_token_ids"]),
        )
        for row in skyrl.rows(samples)
    ]


READERS: list[Callable[[list[Sample]], list[Read]]] = [
    from_slime,
    from_verl,
    from_prime_rl,
    from_areal,
    from_trl,
    from_tinker,
    from_skyrl,
]


@settings(searching, max_examples=100)
@given(rollouts(), policies(), st.floats(-2, 2).filter(lambda value: abs(value) > 1e-6))
def test_trained_tokens_keep_their_places_and_their_logprobs(
    made: tuple[Rollout, list[Recording]], chosen: CutPolicy, advantage: float
) -> None:
    rollout, _ = made
    linearized = linearize(rollout, chosen, versions=VERSIONS)
    samples = [
        msgspec.structs.replace(sample, reward=1.0)
        for sample in linearized.samples(advantage=advantage)
        if np.isfinite(sample.logprobs[sample.trained_mask]).all()
    ]
    assume(samples)
    for read in READERS:
        assert read(samples) == [recorded(sample) for sample in samples], read.__name__
