"""Of which kind logprobs are is measured right for every kind, also where arithmetic is coarse."""

import numpy as np
import numpy.typing as npt
import pytest

from rolltape.doctor import ENGINE_CHECKS, EngineProbe, Severity
from rolltape.doctor.engine.logprob_kinds import measure_kind
from rolltape.gateway.engines.function import FunctionEngine
from rolltape.gateway.engines.protocol import TOP_LOGPROBS, Generated, Generation
from rolltape.gateway.engines.sampled import top_side_arrays
from rolltape.records.turn import Finish, LogprobKind

VOCABULARY = 2000
KINDS = list(LogprobKind)
Floats = npt.NDArray[np.float64]
APPLIES = ("temperature", "top_k", "max_tokens", TOP_LOGPROBS)


def engine(
    kind: LogprobKind, *, noise: float = 0.0, declared: LogprobKind | None = None, tops: bool = True
) -> EngineProbe:
    """A made-up model: logits by the last ids of the prompt; its arithmetic is off by `noise`."""
    rng = np.random.default_rng(7)

    def normal(logits: Floats) -> Floats:
        shifted: Floats = logits - logits.max()
        return np.asarray(shifted - np.log(np.exp(shifted).sum()))

    async def sample(prompt_ids: list[int], wanted: Generation) -> Generated:
        temperature = wanted.sampling.temperature or 1.0
        ids: list[int] = []
        logprobs, lists = [], []
        assert wanted.sampling.max_tokens is not None
        for _ in range(wanted.sampling.max_tokens):
            context = np.random.default_rng([*prompt_ids[-4:], *ids[-4:]])
            logits = context.normal(size=VOCABULARY) * 4 + rng.normal(size=VOCABULARY) * noise
            tempered = normal(logits / temperature)
            kept = tempered.copy()
            if wanted.sampling.top_k:
                kept[np.argsort(kept)[: -wanted.sampling.top_k]] = -np.inf
            kept = normal(kept)
            by_kind = dict(zip(KINDS, (normal(logits), tempered, kept), strict=True))
            token = int(rng.choice(VOCABULARY, p=np.exp(kept)))
            ids.append(token)
            logprobs.append(float(by_kind[kind][token]))
            best = np.argsort(-by_kind[kind])[: wanted.top_logprobs]
            lists.append([(int(one), float(by_kind[kind][one])) for one in best])
        array = np.array(ids, dtype=np.int32)
        side = top_side_arrays(lists, array, wanted, "here")
        values = np.array(logprobs)
        return Generated(
            ids=array, logprobs=values, finish=Finish.LENGTH, logprob_kind=declared or kind, side_arrays=side
        )

    return EngineProbe(FunctionEngine(sample, applies=APPLIES if tops else APPLIES[:-1]))


@pytest.mark.parametrize("noise", [0.0, 0.05], ids=["exact", "coarse"])
@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_is_measured(kind: LogprobKind, noise: float) -> None:
    assert (await measure_kind(engine(kind, noise=noise))).kind is kind


@pytest.mark.parametrize("declared", KINDS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_kind_is_a_fault_where_another_is_declared(kind: LogprobKind, declared: LogprobKind) -> None:
    result = await ENGINE_CHECKS["logprob kind"](engine(kind, declared=declared))
    assert result is not None
    assert result.verdict is (Severity.OK if kind is declared else Severity.FAULT)


@pytest.mark.parametrize(
    ("kind", "declared", "verdict"),
    [
        (LogprobKind.RAW, LogprobKind.RAW, Severity.OK),
        (LogprobKind.RAW, LogprobKind.AFTER_TEMPERATURE, Severity.FAULT),
        (LogprobKind.AFTER_TEMPERATURE, LogprobKind.RAW, Severity.FAULT),
        (LogprobKind.AFTER_TEMPERATURE, LogprobKind.AFTER_TEMPERATURE, Severity.NOTE),
    ],
)
async def test_without_lists_of_likely_ids_raw_logprobs_are_told_from_others(
    kind: LogprobKind, declared: LogprobKind, verdict: Severity
) -> None:
    result = await ENGINE_CHECKS["logprob kind"](engine(kind, declared=declared, tops=False))
    assert result is not None
    assert result.verdict is verdict
