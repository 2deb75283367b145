"""A token record: one sequence as the trainer saw it, in aligned per-token columns."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import MisalignedError
from rolltape.records.tokens import Ids

TOKEN_SCHEMA = "rolltape.token/1"  # a column may be added; a change of meaning raises the version

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

ID_COLUMNS = ("ids", "position_ids")
FLAG_COLUMNS = ("trained_mask", "masked", "masked_high", "masked_low")
FLOAT_COLUMNS = (
    "advantages",
    "rewards",
    "entropy",
    "inference_logprobs",
    "trainer_logprobs",
    "old_logprobs",
    "reference_logprobs",
    "log_ratio",
    "ratio",
    "mismatch_kl",
    "prob_delta",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
)
NEEDED_COLUMNS = (*ID_COLUMNS, "trained_mask", "trainer_logprobs")  # every record has them
TOKEN_COLUMNS = (*ID_COLUMNS, *FLAG_COLUMNS, *FLOAT_COLUMNS)


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One sequence of one micro-batch. A column that is None was not given, or cannot be computed from what was.

    With r = trainer logprob − inference logprob: `log_ratio` is r, `ratio` exp(r), `mismatch_kl` exp(r) − r − 1,
    and `prob_delta` exp(trainer logprob) − exp(inference logprob).
    """

    step: int
    rank: int
    micro_step: int
    micro_sequence: int  # its place in the micro-batch
    sequence: int  # its place among the records of this step and rank
    sample: str | None = None
    rollout: str | None = None
    group: str | None = None
    env: str | None = None
    versions: tuple[str, ...] = ()  # weight versions that sampled it, as the trainer was told
    reward: float | None = None  # None: none given, or given token by token
    loss: str | None = None  # the loss specification as JSON; None: none named
    ids: Ids
    position_ids: Ids
    trained_mask: Flags
    trainer_logprobs: Floats
    inference_logprobs: Floats | None = None
    old_logprobs: Floats | None = None  # what a clipped loss compares with, where that is not the inference logprob
    reference_logprobs: Floats | None = None
    advantages: Floats | None = None
    rewards: Floats | None = None
    entropy: Floats | None = None
    log_ratio: Floats | None = None
    ratio: Floats | None = None
    mismatch_kl: Floats | None = None
    prob_delta: Floats | None = None
    masked: Flags | None = None  # trained, but its policy-gradient term is zero
    masked_high: Flags | None = None  # because its probability rose too far
    masked_low: Flags | None = None  # because its probability fell too far
    rl_weights: Floats | None = None
    ce_weights: Floats | None = None
    ref_kl_weights: Floats | None = None

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in self.columns().items()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise MisalignedError(f"{self.place}: its columns differ in length: {told}")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def place(self) -> str:
        """Where the record stands in its run."""
        return f"{self.step}.{self.rank}.{self.sequence}"

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.trained_mask))

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The per-token columns that there are, by name."""
        named = ((name, getattr(self, name)) for name in TOKEN_COLUMNS)
        return {name: values for name, values in named if values is not None}
