"""A rollout's summary as fixed arrays, so that those of a hundred thousand rollouts are read as one."""

import numpy as np

from rolltape.records.fork import ForkCause
from rolltape.records.ids import digest_of
from rolltape.records.policy import PRESETS
from rolltape.records.rollout_summary import SUMMARY_RULES, RolloutSummary
from rolltape.records.sample import Fate

CAUSES = tuple(ForkCause)
FATES = tuple(Fate)
POLICIES = tuple(PRESETS)
# An index whose arrays are of another layout, or of other rules, is made again.
LAYOUT = digest_of(str(SUMMARY_RULES), *CAUSES, *FATES, *(one.key for one in PRESETS.values())).hex()


def pack_summary(summary: RolloutSummary) -> tuple[bytes, bytes, bytes]:
    """Forks by cause, samples by policy, and sampled tokens by policy and fate."""
    policies = [summary.policies[name] for name in POLICIES]
    forks = np.array([summary.forks.get(cause.value, 0) for cause in CAUSES], "<i4")
    samples = np.array([one.samples for one in policies], "<i4")
    ledgers = np.array([[one.ledger.get(fate.value, 0) for fate in FATES] for one in policies], "<i8")
    return forks.tobytes(), samples.tobytes(), ledgers.tobytes()
