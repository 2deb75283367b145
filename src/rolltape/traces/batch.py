"""A trainer's padded batch → traces: each run of the loss mask is a reply, what lies between them is context."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rolltape.records.choice import Candidate, Pick
from rolltape.records.rollout import Status
from rolltape.records.summary import ShownStep, StepSummary, spread_of
from rolltape.records.trace import Trace, TraceStep
from rolltape.traces.decoding import decoded
from rolltape.traces.padded import Batch, HeldBatch, Row, held_batch, rows_of


def traces_from_batch(
    batch: Batch, tokenizer: Any, *, split: str, step: int, run: str = "batch", pick: Pick | None = None
) -> ShownStep:
    """The traces of a padded batch, and what all of it comes to; `pick` says which rows are decoded, by default all.

    A table holds `input_ids`, `loss_mask`, and where there are any `attention_mask`, `logprobs`, `versions` and
    `rewards`. A batch is a table, or a list of them with None for what was rejected, which is counted.
    """
    return traces_of_held(held_batch(batch), tokenizer, split=split, step=step, run=run, pick=pick)


async def traces_from_batch_async(
    batch: Batch, tokenizer: Any, *, split: str, step: int, run: str = "batch", pick: Pick | None = None
) -> ShownStep:
    """The same for coroutines: tensors are copied before it first waits, and decoded on another thread."""
    held = held_batch(batch)
    return await asyncio.to_thread(traces_of_held, held, tokenizer, split=split, step=step, run=run, pick=pick)


def traces_of_held(
    held: HeldBatch, tokenizer: Any, *, split: str, step: int, run: str = "batch", pick: Pick | None = None
) -> ShownStep:
    """As `traces_from_batch`, of a batch that is on the host already."""
    rows = list(rows_of(held))
    candidates = [Candidate(_id(row, split, step), row.reward) for row in rows]
    positions = range(len(rows)) if pick is None else pick(split, step, candidates)
    picked = [rows[position] for position in positions]
    bounds = [_bounds(row) for row in picked]
    segments = [row.ids[start:stop].tolist() for row, cuts in zip(picked, bounds, strict=True) for start, stop in cuts]
    texts = iter(decoded(tokenizer, segments))
    traces = [
        _trace(row, [(start, stop, next(texts)) for start, stop in cuts], split, step, run)
        for row, cuts in zip(picked, bounds, strict=True)
    ]
    return ShownStep(split=split, step=step, traces=tuple(traces), summary=_summary(rows, held.rejected))


def _bounds(row: Row) -> list[tuple[int, int]]:
    """The stretches in which the loss mask does not change."""
    if not len(row.ids):
        return []
    changes = np.flatnonzero(np.diff(row.trained_mask)) + 1
    return list(pairwise([0, *changes.tolist(), len(row.ids)]))


def _trace(row: Row, segments: Sequence[tuple[int, int, str]], split: str, step: int, run: str) -> Trace:
    steps = tuple(_steps(row, segments))
    return Trace(
        run=run,
        rollout=_id(row, split, step),
        try_index=0,
        group=_id(row, split, step).rpartition("/")[0],
        step=step,
        attempt=row.row,
        source=f"{run}#{split}",
        versions=tuple(map(str, _versions(row))),
        status=Status.FINISHED,
        total_reward=row.reward,
        final_reward=row.reward,
        extra={
            "entry": row.entry,
            "row": row.row,
            "tokens": len(row.ids),
            "trained_tokens": int(row.trained_mask.sum()),
        },
        steps=steps,
    )


def _steps(row: Row, segments: Sequence[tuple[int, int, str]]) -> Iterator[TraceStep]:
    """A step per reply, with the context before it; context after the last one is a step without a reply."""
    index = kept = 0
    prompt: list[Any] = []
    for start, stop, text in segments:
        trained = bool(row.trained_mask[start])
        if not trained:
            prompt = [{"role": "user", "content": text}]
            if stop < len(row.ids):
                continue
        yield TraceStep(
            index=index,
            messages_from=index - 1 if index else None,
            kept_messages=kept,
            prompt=prompt,
            policy_response={"role": "assistant", "content": text} if trained else None,
            prompt_tokens=start if trained else stop,
            sampled_tokens=stop - start if trained else 0,
            metrics=_logprob_figures(row, start, stop) if trained else None,
        )
        index, kept, prompt = index + 1, kept + len(prompt) + trained, []


def _versions(row: Row) -> dict[int, int]:
    """The weight versions of trained tokens as they first appear, each with its tokens.

    What was not sampled has a placeholder below 0.
    """
    if row.versions is None:
        return {}
    trained = row.versions[row.trained_mask]
    found, firsts, counts = np.unique(trained[trained >= 0], return_index=True, return_counts=True)
    return {int(found[place]): int(counts[place]) for place in np.argsort(firsts)}


def _logprob_figures(row: Row, start: int, stop: int) -> dict[str, Any] | None:
    if row.logprobs is None:
        return None
    own = row.logprobs[start:stop].astype(np.float64)
    finite = own[np.isfinite(own)]
    return {"mean_logprob": float(finite.mean())} if len(finite) else None


def _summary(rows: Sequence[Row], rejected: int) -> StepSummary:
    rewards = [row.reward for row in rows if row.reward is not None]
    spread = spread_of(rewards)
    versions: Counter[int] = Counter()
    for row in rows:
        versions.update(_versions(row))
    newest = max(versions, default=0)
    return StepSummary(
        rollouts=len(rows),
        rejected=rejected,
        statuses={Status.FINISHED: len(rows)} if rows else {},
        rewards=spread,
        rewards_not_finite=len(rewards) - (spread.count if spread is not None else 0),
        turns=spread_of(_replies(row) for row in rows),
        trained_tokens=spread_of(int(row.trained_mask.sum()) for row in rows),
        context_tokens=spread_of(len(row.ids) for row in rows),
        staleness={newest - version: count for version, count in sorted(versions.items(), reverse=True)},
    )


def _replies(row: Row) -> int:
    """How many runs of the loss mask are trained."""
    return int(np.count_nonzero(np.diff(np.concatenate([[False], row.trained_mask]).astype(np.int8)) == 1))


def _id(row: Row, split: str, step: int) -> str:
    """Where the row stands: a batch does not say which rollout it is of."""
    return f"{split}/{step}/{row.entry}/{row.row}"
