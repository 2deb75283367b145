"""Samples for slime: the dicts for its `Sample.from_dict`, and the hook that gives it our advantages."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from rolltape.errors import ExportError
from rolltape.export.formats.arrays import KEPT_IDS, Experts, all_routed_experts, logprobs_or_zero
from rolltape.export.formats.fitting import Fact, Form, Need, Routing, fitted
from rolltape.records.sample import Sample

FORM = Form(
    framework="slime",
    needs=(Need.LOGPROBS, Need.REWARD),
    routing=Routing.ALL,
    kept_ids=True,
    optional_logprobs=True,
    leaves_out={
        Fact.WEIGHTS: "slime's loss takes one mean over all tokens of a rollout; loss_weight is only in the metadata",
        Fact.SEVERAL_VERSIONS: "weight_versions lists them, without saying which token is whose",
        Fact.UNSURE_VERSION: "weight_versions lists both",
        Fact.SOME_KEPT_IDS: "the other tokens are masked: slime could not compute logprobs like theirs",
    },
)


def slime_samples(samples: Iterable[Sample], *, logprobs: bool = True) -> list[dict[str, Any]]:
    """The arguments of `slime.utils.types.Sample.from_dict`, one dict per sample.

    `logprobs=False` leaves `rollout_log_probs` out, which slime allows if it computes the old logprobs itself.
    """
    return list(rows(fitted(samples, FORM.carrying(logprobs=logprobs)), logprobs=logprobs))


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """For `--custom-reward-post-process-path`: raw rewards, and the advantages that we computed over rollouts."""
    held = [sample.metadata["rolltape"] for sample in samples]
    for facts in held:
        if facts["advantage"] is None:
            raise ExportError(
                f"sample {facts['sample']}: no advantage, but it is to stand for slime's; give credit with an advantage"
            )
    return [sample.get_reward_value(args) for sample in samples], [facts["advantage"] for facts in held]


def rows(samples: Sequence[Sample], *, logprobs: bool = True) -> Iterator[dict[str, Any]]:
    """The dicts of samples that fit, as plain lists except for the routed experts.

    If one sample has kept ids, all get the fields. A token without kept ids was sampled among all ids, or not sampled.
    """
    groups: dict[str, int] = {}
    rollouts: dict[tuple[str, int], int] = {}
    # slime assumes that all samples have them if the first one has.
    experts: Sequence[Experts | None] = all_routed_experts(samples) or [None] * len(samples)
    with_kept_ids = any(KEPT_IDS in sample.side for sample in samples)
    for index, (sample, routed) in enumerate(zip(samples, experts, strict=True)):
        yield {
            # Numbers that are unique in one call, since slime needs integers. The ids are in the metadata.
            "group_index": groups.setdefault(sample.group, len(groups)),
            "index": index,
            # Siblings share it, so that slime's loss takes one mean over all tokens of the rollout.
            "rollout_id": rollouts.setdefault((sample.rollout, sample.try_index), len(rollouts)),
            **_response(sample, logprobs),
            **({} if routed is None else {"rollout_routed_experts": routed}),
            **(kept_ids(sample) if with_kept_ids else {}),
            "reward": sample.reward,
            "weight_versions": _weight_versions(sample),
            "status": "truncated" if sample.truncated else "completed",
            "session_id": sample.session,
            "metadata": {"rolltape": _identity(sample)},
        }


def kept_ids(sample: Sample) -> dict[str, list[int]]:
    """slime's fields for the ids that top-p kept: those of all response tokens, and where each token's begin."""
    side, start = sample.side.get(KEPT_IDS), sample.prompt_tokens
    if side is None or side.counts is None:
        return {"rollout_top_p_token_ids": [], "rollout_top_p_token_offsets": [0] * (len(sample.ids) - start + 1)}
    ends = np.cumsum(side.counts[start:], dtype=np.int64)
    before = int(side.counts[:start].sum())
    return {
        "rollout_top_p_token_ids": side.values[before:].tolist(),
        "rollout_top_p_token_offsets": [0, *ends.tolist()],
    }


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row as plain JSON values."""
    experts: Experts | None = row.get("rollout_routed_experts")
    return row if experts is None else {**row, "rollout_routed_experts": experts.tolist()}


def _response(sample: Sample, logprobs: bool) -> dict[str, Any]:
    """All ids, and the columns that cover what follows the prompt."""
    start = sample.prompt_tokens
    return {
        "tokens": sample.ids.tolist(),
        "response_length": len(sample.ids) - start,
        "loss_mask": sample.trained_mask[start:].astype(np.int8).tolist(),
        "rollout_log_probs": logprobs_or_zero(sample)[start:].tolist() if logprobs else None,
    }


def _weight_versions(sample: Sample) -> list[str]:
    """The versions of trained tokens, in order of first appearance."""
    used = dict.fromkeys(sample.version_index[sample.trained_mask].tolist())
    return list(dict.fromkeys(name for index in used if index >= 0 for name in sample.versions[index]))


def _identity(sample: Sample) -> dict[str, Any]:
    return {
        "sample": sample.id,
        "rollout": sample.rollout,
        "try_index": sample.try_index,
        "group": sample.group,
        "step": sample.step,
        "advantage": sample.advantage,
        "loss_weight": sample.loss_weight,
        "uses_tools": sample.uses_tools,
        "ill_formed": sample.ill_formed,
    }
