"""Samples for prime-rl: the fields of its `TrainingSample` in version 0.8."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.errors import ExportError
from rolltape.export.formats.arrays import advantages_or_zero, logprobs_or_zero, routed_experts
from rolltape.export.formats.fitting import Fact, Form, Need, Routing, fitted
from rolltape.records.sample import Sample, Span
from rolltape.records.turn import LogprobKind

# One temperature for all, or the temperature of each turn by its id.
Temperatures = float | Mapping[str, float]

FORM = Form(
    framework="prime-rl",
    needs=(Need.LOGPROBS, Need.ADVANTAGE),
    routing=Routing.EACH,
    one_value=(),
    leaves_out={
        Fact.FORKED: "loss_weight is not carried; prime-rl's loss counts tokens, and each trains in one sample",
        Fact.SEVERAL_VERSIONS: "no weight version is carried",
        Fact.UNSURE_VERSION: "no weight version is carried",
    },
)


def training_samples(
    samples: Iterable[Sample], *, env_name: str, temperature: Temperatures | None = None
) -> list[dict[str, Any]]:
    """The arguments of `prime_rl`'s `TrainingSample`, one dict per sample. `routed_experts` are those of its struct.

    prime-rl divides its logits by the temperature that replies were sampled at. The samples have it, unless
    `temperature` is given: one for all, or one for each turn by its id.
    """
    return [row(sample, env_name, temperature) for sample in fitted(samples, FORM)]


def row(sample: Sample, env_name: str, temperature: Temperatures | None = None) -> dict[str, Any]:
    """The fields of a sample that fits."""
    if env_name == "all":
        raise ExportError("env_name is 'all', which prime-rl keeps for its totals; give another name")
    experts = routed_experts(sample)
    fields = {
        "token_ids": sample.ids.tolist(),
        "mask": sample.trained_mask.tolist(),
        "logprobs": logprobs_or_zero(sample).tolist(),
        "temperatures": _temperatures(sample, temperature).tolist(),
        "env_name": env_name,
        "advantages": advantages_or_zero(sample).tolist(),
    }
    if experts is None:
        return fields
    # The last token was never fed. prime-rl still needs a row for it, and has zeros there itself.
    whole = np.concatenate([experts, np.zeros((1, *experts.shape[1:]), np.int32)])
    return {**fields, "routed_experts": {"data": whole.tobytes(), "shape": list(whole.shape), "dtype": "int32"}}


def _temperatures(sample: Sample, given: Temperatures | None) -> npt.NDArray[np.float64]:
    """At each token, the temperature at which the next trained token was sampled.

    prime-rl divides the logits at a token, which predict the next token, by the temperature there.
    """
    values = np.ones(len(sample.ids))
    done = 0
    for span in sample.spans:
        if sample.trained_mask[span.start : span.stop].any():
            values[done:] = _of_span(span, sample, given)
            done = span.stop - 1
    return values


def _of_span(span: Span, sample: Sample, given: Temperatures | None) -> float:
    temperature = span.temperature if given is None else given.get(span.turn) if isinstance(given, Mapping) else given
    if temperature is None:
        raise ExportError(
            f"turn {span.turn}: no temperature was recorded, and prime-rl needs one; "
            "give temperature=, or --temperature"
        )
    if span.logprob_kind is LogprobKind.RAW and temperature != 1:
        raise ExportError(
            f"sample {sample.id}: logprobs of turn {span.turn} are raw, but prime-rl compares them with its own at "
            f"temperature {temperature:g}; have the engine give them after temperature, or give temperature 1 to "
            "compare raw ones"
        )
    return temperature
