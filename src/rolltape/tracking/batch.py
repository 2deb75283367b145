"""Converts a trainer's padded batch to traces and a summary. Each run of trained tokens in the loss mask is a reply."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rolltape.errors import RecordError
from rolltape.records.jsonable import shown
from rolltape.records.rollout import Status
from rolltape.records.trace import Trace, TraceStep
from rolltape.tracking.choice import Candidate, Pick
from rolltape.tracking.padded import Batch, HostBatch, Row, batch_rows, copy_to_host
from rolltape.tracking.sinks import Deferred, Sink
from rolltape.tracking.summary import ShownStep, StepSummary, compute_spread, compute_staleness

Segments = Sequence[Sequence[int]]  # of token ids


def show_batch(sink: Sink, batch: Batch, tokenizer: Any, *, split: str, step: int, run: str = "batch") -> bool:
    """Copy a padded batch to the host, where the sink decodes what it shows. Return False if it was dropped.

    Example:

        with rolltape.trackio_sink(project="sums") as sink:
            rolltape.show_batch(sink, batch, tokenizer, split="train", step=3)
    """
    try:
        held = copy_to_host(batch)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a batch, showing it must not stop a training
        return sink.put(_failing(error))
    return sink.put(lambda pick: _shown_step(held, tokenizer, split=split, step=step, run=run, pick=pick))


def traces_from_batch(
    batch: Batch, tokenizer: Any, *, split: str, step: int, run: str = "batch", pick: Pick | None = None
) -> ShownStep:
    """Convert a padded batch to traces and a summary. `pick` chooses which rows are decoded; by default all are.

    A table holds `input_ids`, `loss_mask`, and optionally `attention_mask`, `logprobs`, `versions` and `rewards`. A
    batch is a table, or a list of tables. None, alone or in the list, is a rejected table; these are counted.

    Example:

        shown = rolltape.traces_from_batch(batch, tokenizer, split="train", step=3)
        print(shown.summary.rewards.mean, [trace.total_reward for trace in shown])
    """
    return _shown_step(copy_to_host(batch), tokenizer, split=split, step=step, run=run, pick=pick)


async def traces_from_batch_async(
    batch: Batch, tokenizer: Any, *, split: str, step: int, run: str = "batch", pick: Pick | None = None
) -> ShownStep:
    """As `traces_from_batch`, but texts are decoded on another thread. Tensors are copied before the first await."""
    held = copy_to_host(batch)
    return await asyncio.to_thread(_shown_step, held, tokenizer, split=split, step=step, run=run, pick=pick)


def _failing(error: Exception) -> Deferred:
    """A step that could not be copied: the sink counts it as failed, with the reason."""

    def fail(pick: Pick) -> ShownStep:
        raise error

    return fail


def _shown_step(held: HostBatch, tokenizer: Any, *, split: str, step: int, run: str, pick: Pick | None) -> ShownStep:
    rows = list(batch_rows(held))
    candidates = [Candidate(_row_id(row, split, step), row.reward) for row in rows]
    positions = range(len(rows)) if pick is None else pick(split, step, candidates)
    picked = [rows[position] for position in positions]
    bounds = [_segment_bounds(row) for row in picked]
    segments = [row.ids[start:stop].tolist() for row, cuts in zip(picked, bounds, strict=True) for start, stop in cuts]
    texts = iter(decode_segments(tokenizer, segments))
    traces = [
        _trace(row, [(start, stop, next(texts)) for start, stop in cuts], split, step, run)
        for row, cuts in zip(picked, bounds, strict=True)
    ]
    return ShownStep(split=split, step=step, traces=tuple(traces), summary=_summary(rows, held.rejected))


def _segment_bounds(row: Row) -> list[tuple[int, int]]:
    """The segments in which the loss mask does not change."""
    if not len(row.ids):
        return []
    changes = np.flatnonzero(np.diff(row.trained_mask)) + 1
    return list(pairwise([0, *changes.tolist(), len(row.ids)]))


def _trace(row: Row, segments: Sequence[tuple[int, int, str]], split: str, step: int, run: str) -> Trace:
    steps = tuple(_steps(row, segments))
    return Trace(
        run=run,
        rollout=_row_id(row, split, step),
        try_index=0,
        group=_row_id(row, split, step).rpartition("/")[0],
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
    """A step per reply, with the context before it. Context after the last reply is a step without a reply."""
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
            metrics=_logprob_metrics(row, start, stop) if trained else None,
        )
        index, kept, prompt = index + 1, kept + len(prompt) + trained, []


def _versions(row: Row) -> dict[int, int]:
    """How many trained tokens each weight version has, in order of first appearance. Below 0 there is no version."""
    if row.versions is None:
        return {}
    trained = row.versions[row.trained_mask]
    found, firsts, counts = np.unique(trained[trained >= 0], return_index=True, return_counts=True)
    return {int(found[place]): int(counts[place]) for place in np.argsort(firsts)}


def _logprob_metrics(row: Row, start: int, stop: int) -> dict[str, Any] | None:
    if row.logprobs is None:
        return None
    own = row.logprobs[start:stop].astype(np.float64)
    finite = own[np.isfinite(own)]
    return {"mean_logprob": float(finite.mean())} if len(finite) else None


def _summary(rows: Sequence[Row], rejected: int) -> StepSummary:
    rewards = [row.reward for row in rows if row.reward is not None]
    spread = compute_spread(rewards)
    versions: Counter[int] = Counter()
    for row in rows:
        versions.update(_versions(row))
    return StepSummary(
        rollouts=len(rows),
        rejected=rejected,
        statuses={Status.FINISHED: len(rows)} if rows else {},
        rewards=spread,
        rewards_not_finite=len(rewards) - (spread.count if spread is not None else 0),
        turns=compute_spread(_replies(row) for row in rows),
        trained_tokens=compute_spread(int(row.trained_mask.sum()) for row in rows),
        context_tokens=compute_spread(len(row.ids) for row in rows),
        staleness=compute_staleness(versions),
    )


def _replies(row: Row) -> int:
    """How many runs of trained tokens the loss mask has."""
    return int(np.count_nonzero(np.diff(np.concatenate([[False], row.trained_mask]).astype(np.int8)) == 1))


def _row_id(row: Row, split: str, step: int) -> str:
    """An id made of the row's place, since a batch does not name its rollouts."""
    return f"{split}/{step}/{row.entry}/{row.row}"


def decode_segments(tokenizer: Any, segments: Segments) -> list[str]:
    """The text of each segment, special tokens included. A segment that the tokenizer refuses is shown as numbers."""
    decode = _decoder(tokenizer)
    try:
        return decode(segments)
    except Exception:  # noqa: BLE001 - tokenizers raise what they like for an id that they do not have
        return [_decode_alone(decode, segment) for segment in segments]


def _decoder(tokenizer: Any) -> Callable[[Segments], list[str]]:
    """Decodes many segments at once, by a tokenizer of transformers or tokenizers, or a function of ids."""
    if hasattr(tokenizer, "batch_decode"):
        return lambda many: list(
            tokenizer.batch_decode(many, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
    if hasattr(tokenizer, "decode_batch") and hasattr(tokenizer, "id_to_token"):  # tiktoken has the first alone
        return lambda many: list(tokenizer.decode_batch(many, skip_special_tokens=False))
    one = tokenizer.decode if hasattr(tokenizer, "decode") else tokenizer
    if not callable(one):
        raise RecordError(f"the tokenizer is {shown(tokenizer)}; give one of transformers or tokenizers, or a function")
    return lambda many: [str(one(segment)) for segment in many]


def _decode_alone(decode: Callable[[Segments], list[str]], segment: Sequence[int]) -> str:
    try:
        return decode([segment])[0]
    except Exception:  # noqa: BLE001 - as above
        return " ".join(f"#{token}" for token in segment)
