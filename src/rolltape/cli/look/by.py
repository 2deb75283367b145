"""The measures that tokens can be coloured by."""

import enum


class By(enum.StrEnum):
    TRAINED = "trained"  # what becomes of the token
    LOGPROB = "logprob"  # as the engine gave it
    PROBABILITY = "probability"
    VERSION = "version"  # of the weights that sampled it
    # As a trainer exported them.
    ENTROPY = "entropy"
    ADVANTAGE = "advantage"
    RATIO = "ratio"
    MISMATCH_KL = "mismatch_kl"

    @property
    def column(self) -> str | None:
        """The column of a token record that it is; None: it is the sample's own."""
        columns = {By.ENTROPY: "entropy", By.ADVANTAGE: "advantages", By.RATIO: "ratio", By.MISMATCH_KL: "mismatch_kl"}
        return columns.get(self)
