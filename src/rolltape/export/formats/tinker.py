"""Samples for Tinker: datums in the form of its JSON."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.export.formats.arrays import advantages_or_zero, logprobs_or_zero
from rolltape.export.formats.fitting import Fact, Form, Need, fitted
from rolltape.records.sample import Sample

FORM = Form(
    framework="tinker",
    needs=(Need.LOGPROBS, Need.ADVANTAGE),
    leaves_out={
        Fact.FORKED: "loss_weight is not carried; Tinker's loss sums over tokens, and each trains in one sample",
        Fact.SEVERAL_VERSIONS: "no weight version is carried",
        Fact.UNSURE_VERSION: "no weight version is carried",
    },
)


def datums(samples: Iterable[Sample], *, mask: bool = False) -> list[dict[str, Any]]:
    """The fields of a `tinker.Datum` for each sample, for the losses that use logprobs and advantages.

    `mask=True` adds the mask that tinker-cookbook uses for its metrics and removes before it calls the service.
    """
    return [row(sample, mask=mask) for sample in fitted(samples, FORM)]


def row(sample: Sample, *, mask: bool = False) -> dict[str, Any]:
    """A datum: all ids but the last as input, all but the first as targets, and the columns of the targets."""
    targets: dict[str, npt.NDArray[Any]] = {
        "target_tokens": sample.ids.astype(np.int64),
        "logprobs": logprobs_or_zero(sample).astype(np.float32),
        # Zero where nothing trains: these losses have no other mask.
        "advantages": advantages_or_zero(sample),
        **({"mask": sample.trained_mask.astype(np.float32)} if mask else {}),
    }
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": sample.ids[:-1].tolist()}]},
        "loss_fn_inputs": {name: _tensor(column[1:]) for name, column in targets.items()},
    }


def _tensor(column: npt.NDArray[Any]) -> dict[str, Any]:
    return {"data": column.tolist(), "dtype": column.dtype.name, "shape": list(column.shape)}
