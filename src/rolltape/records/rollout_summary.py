"""A rollout's summary: its branches, its forks by cause, and its ledger under each preset, as counts."""

import msgspec

# Raised when the same rollout would come to other counts than before.
SUMMARY_RULES = 3


class PolicySummary(msgspec.Struct, frozen=True):
    """A rollout under one policy. The ledger is as if it were not filtered: a filter is looked up by itself."""

    key: str  # of the policy
    samples: int
    ledger: dict[str, int]  # sampled tokens by fate


class RolloutSummary(msgspec.Struct, frozen=True):
    """What lists and plots show of a rollout."""

    rules: int  # the SUMMARY_RULES by which it was counted
    branches: int
    forks: dict[str, int]  # by cause
    policies: dict[str, PolicySummary]  # by the policy's name
