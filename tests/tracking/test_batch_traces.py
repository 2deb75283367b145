"""A trainer's padded batch as traces: cut at the runs of its loss mask, padding gone, rejected ones counted."""

import asyncio
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rolltape.errors import MisalignedError, RecordError
from rolltape.records.trace import Trace
from rolltape.tracking import traces_from_batch, traces_from_batch_async


def words(ids: Sequence[int]) -> str:
    """A tokenizer: each id is a word."""
    return " ".join(f"w{token}" for token in ids)


def table(
    ids: Sequence[Sequence[int]], trained: Sequence[Sequence[int]], *, pad: int = 0, left: bool = False, **more: Any
) -> dict[str, Any]:
    """A table padded with id `pad` on one side."""
    width = max(map(len, ids), default=0)

    def padded(rows: Sequence[Sequence[int]], filler: int) -> Any:
        full = [
            [*[filler] * (width - len(row)), *row] if left else [*row, *[filler] * (width - len(row))] for row in rows
        ]
        return torch.tensor(full, dtype=torch.int64).reshape(len(rows), width)

    return {
        "input_ids": padded(ids, pad),
        "attention_mask": padded([[1] * len(row) for row in ids], 0),
        "loss_mask": padded(trained, 0),
        **more,
    }


def line(trace: Trace) -> str:
    """A trace in a line, replies in brackets, steps apart."""
    parts = []
    for step in trace.steps:
        assert isinstance(step.prompt, list)
        said = [message["content"] for message in step.prompt]
        if step.policy_response is not None:
            said.append(f"«{step.policy_response['content']}»")
        parts.append(" ".join(said))
    return " | ".join(parts)


def made(batch: Any, **more: Any) -> Any:
    return traces_from_batch(batch, words, split="train", step=3, **more)


def test_a_reply_is_a_run_of_the_loss_mask_and_context_after_the_last_is_kept() -> None:
    (trace,) = made(table([[1, 2, 3, 4, 5, 6, 7]], [[0, 0, 1, 1, 0, 1, 0]]))
    assert line(trace) == "w1 w2 «w3 w4» | w5 «w6» | w7"
    assert [(step.prompt_tokens, step.sampled_tokens) for step in trace.steps] == [(2, 2), (5, 1), (7, 0)]


def test_history_is_held_once_and_whole_prompts_can_be_asked_for() -> None:
    (trace,) = made(table([[1, 2, 3, 4, 5]], [[0, 1, 0, 1, 0]]))
    whole = trace.whole_prompt(2)
    assert [message["content"] for message in whole] == ["w1", "w2", "w3", "w4", "w5"]
    assert [message["role"] for message in whole] == ["user", "assistant", "user", "assistant", "user"]


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padding_is_left_out_on_either_side(left: bool) -> None:
    shown = made(table([[1, 2, 3], [4, 5]], [[0, 1, 1], [0, 1]], pad=99, left=left))
    assert [line(trace) for trace in shown] == ["w1 «w2 w3»", "w4 «w5»"]


def test_mask_that_starts_with_a_reply_and_alternates_every_token() -> None:
    (trace,) = made(table([[1, 2, 3, 4, 5]], [[1, 0, 1, 0, 1]]))
    assert line(trace) == "«w1» | w2 «w3» | w4 «w5»"


def test_fully_masked_sequence_is_context_alone() -> None:
    shown = made(table([[1, 2]], [[0, 0]]))
    assert line(shown.traces[0]) == "w1 w2"
    assert shown.traces[0].versions == ()
    assert shown.summary.turns.mean == 0


def test_sequence_of_padding_alone_has_no_steps() -> None:
    shown = made(table([[], [1, 2]], [[], [0, 1]]))
    assert [line(trace) for trace in shown] == ["", "w1 «w2»"]
    assert shown.summary.rollouts == 2


def test_mask_on_padding_does_not_count() -> None:
    batch = table([[1, 2], [3]], [[0, 1], [0]])
    batch["loss_mask"][1, 1] = 1
    assert [line(trace) for trace in made(batch)] == ["w1 «w2»", "w3"]


NOTHING = torch.tensor([])


@pytest.mark.parametrize(
    ("batch", "rejected"),
    [
        ([], 0),
        (table([], []), 0),
        ([None, None], 2),
        ({}, 0),
        ([{}, None], 1),
        ({"input_ids": [], "loss_mask": [], "rewards": []}, 0),
        ({"input_ids": NOTHING, "loss_mask": NOTHING, "versions": NOTHING, "rewards": NOTHING}, 0),
    ],
    ids=["nothing", "no rows", "all rejected", "no columns", "none or rejected", "empty lists", "empty tensors"],
)
def test_empty_batch_gives_no_traces(batch: Any, rejected: int) -> None:
    shown = made(batch)
    assert len(shown) == 0
    assert shown.summary.rollouts == 0
    assert shown.summary.rejected == rejected


def test_rejected_entries_are_counted_and_shift_nothing() -> None:
    first, second = table([[1, 2]], [[0, 1]]), table([[3, 4, 5], [6, 7]], [[0, 1, 1], [0, 1]])
    shown = made([None, first, None, second])
    assert shown.summary.rejected == 2
    assert shown.summary.rollouts == 3
    assert [(trace.extra["entry"], trace.extra["row"]) for trace in shown] == [(1, 0), (3, 0), (3, 1)]
    assert len({trace.rollout for trace in shown}) == 3
    assert [trace.group for trace in shown] == ["train/3/1", "train/3/3", "train/3/3"]


def test_versions_are_those_of_trained_tokens() -> None:
    versions = torch.tensor([[-1, -1, 7, 7, 9, 8, -1]])
    (trace,) = made(table([[1, 2, 3, 4, 5, 6, 7]], [[0, 0, 1, 1, 0, 1, 0]], versions=versions))
    assert trace.versions == ("7", "8")


def test_staleness_counts_trained_tokens_behind_the_newest() -> None:
    batch = table([[1, 2, 3], [4, 5, 6]], [[0, 1, 1], [0, 1, 1]], versions=torch.tensor([[-1, 5, 6], [-1, 6, 8]]))
    assert made(batch).summary.staleness == {0: 1, 2: 2, 3: 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_any_float_is_taken_for_masks_logprobs_and_rewards(dtype: torch.dtype) -> None:
    batch = table([[1, 2, 3]], [[0, 1, 1]])
    batch["loss_mask"] = batch["loss_mask"].to(dtype)
    batch["attention_mask"] = batch["attention_mask"].to(dtype)
    batch["logprobs"] = torch.tensor([[0.0, -0.5, -0.25]], dtype=dtype, requires_grad=True)
    batch["rewards"] = torch.tensor([0.75], dtype=dtype)
    (trace,) = made(batch)
    assert line(trace) == "w1 «w2 w3»"
    assert trace.total_reward == 0.75
    assert trace.steps[0].metrics == {"mean_logprob": -0.375}


def test_numpy_lists_and_bool_masks_are_taken() -> None:
    batch = {"input_ids": [[1, 2, 3]], "loss_mask": np.array([[False, True, True]]), "rewards": [[1.5]]}
    (trace,) = made(batch)
    assert line(trace) == "w1 «w2 w3»"
    assert trace.total_reward == 1.5


def test_single_sequence_is_a_table_of_one() -> None:
    (trace,) = made(
        {"input_ids": torch.tensor([1, 2]), "loss_mask": torch.tensor([0, 1]), "rewards": torch.tensor(2.0)}
    )
    assert line(trace) == "w1 «w2»"
    assert trace.total_reward == 2.0


def test_a_row_may_be_without_a_reward() -> None:
    shown = made(table([[1, 2], [3, 4]], [[0, 1], [0, 1]], rewards=[None, 0.1]))
    assert [trace.total_reward for trace in shown] == [None, 0.1]
    assert shown.summary.rewards_not_finite == 0


def test_rewards_that_are_not_finite_stay_numbers() -> None:
    batch = table([[1, 2], [3, 4]], [[0, 1], [0, 1]], rewards=torch.tensor([math.nan, 1.0]))
    shown = made(batch)
    assert math.isnan(shown.traces[0].total_reward)
    assert shown.summary.rewards.mean == 1.0
    assert shown.summary.rewards_not_finite == 1


class Counting:
    """A tensor on some device: only what it is asked for can be read, and each copy is counted."""

    def __init__(self, values: torch.Tensor, copies: list[str], name: str) -> None:
        self._values, self._copies, self._name = values, copies, name

    def detach(self) -> "Counting":
        return self

    def to(self, device: str, *, copy: bool) -> torch.Tensor:
        assert (device, copy) == ("cpu", True)
        self._copies.append(self._name)
        return self._values.clone()


def test_each_tensor_is_copied_from_its_device_once() -> None:
    batch = table(
        [[1, 2, 3], [4, 5, 6], [7, 8]],
        [[0, 1, 1], [0, 1, 1], [0, 1]],
        logprobs=torch.zeros(3, 3),
        versions=torch.zeros(3, 3, dtype=torch.int32),
        rewards=torch.zeros(3),
    )
    copies: list[str] = []
    made({name: Counting(values, copies, name) for name, values in batch.items()})
    assert sorted(copies) == sorted(batch)


def test_later_writes_to_a_tensor_on_the_host_do_not_reach_the_traces() -> None:
    batch = table([[1, 2, 3]], [[0, 1, 1]])
    waiting, go = threading.Event(), threading.Event()

    def slow_words(ids: Sequence[int]) -> str:
        waiting.set()
        go.wait(10)
        return words(ids)

    async def change_meanwhile() -> str:
        making = asyncio.ensure_future(traces_from_batch_async(batch, slow_words, split="train", step=0))
        # The loop is free while the tokenizer is at work, or this would never return.
        await asyncio.to_thread(waiting.wait, 10)
        batch["input_ids"].zero_()
        go.set()
        return line((await making).traces[0])

    assert asyncio.run(change_meanwhile()) == "w1 «w2 w3»"


async def test_coroutine_form_decodes_on_another_thread() -> None:
    threads = []

    def spying(ids: Sequence[int]) -> str:
        threads.append(threading.current_thread())
        return words(ids)

    shown = await traces_from_batch_async(table([[1, 2]], [[0, 1]]), spying, split="eval", step=1)
    assert shown.split == "eval"
    assert threads
    assert threading.main_thread() not in threads


def test_only_picked_rows_are_decoded_and_all_are_counted() -> None:
    seen: list[Sequence[int]] = []

    def spying(ids: Sequence[int]) -> str:
        seen.append(tuple(ids))
        return words(ids)

    batch = table([[1, 2], [3, 4], [5, 6]], [[0, 1]] * 3, rewards=torch.tensor([0.0, 1.0, 2.0]))
    shown = traces_from_batch(batch, spying, split="train", step=3, pick=lambda split, step, candidates: [1])
    assert [line(trace) for trace in shown] == ["w3 «w4»"]
    assert seen == [(3,), (4,)]
    assert shown.summary is not None
    assert shown.summary.rollouts == 3


def test_columns_of_different_shapes_are_refused_by_name() -> None:
    batch = table([[1, 2, 3]], [[0, 1, 1]], logprobs=torch.zeros(1, 2))
    with pytest.raises(
        MisalignedError, match=r"entry 0: input_ids 1×3, attention_mask 1×3, loss_mask 1×3, logprobs 1×2"
    ):
        made(batch)


@pytest.mark.parametrize("ids", [[[1], [1, 2]], [["a"]]], ids=["ragged", "words"])
def test_what_no_array_can_be_made_of_is_refused_by_name(ids: Any) -> None:
    with pytest.raises(RecordError, match="batch entry 0: input_ids cannot be an array"):
        made({"input_ids": ids, "loss_mask": [[1]]})


def test_rewards_per_token_are_refused() -> None:
    with pytest.raises(MisalignedError, match=r"1 sequences but rewards of shape \(1, 3\)"):
        made(table([[1, 2, 3]], [[0, 1, 1]], rewards=torch.zeros(1, 3)))


@pytest.mark.parametrize("name", ["input_ids", "versions"])
def test_ids_and_versions_in_half_precision_are_refused(name: str) -> None:
    batch = table([[1, 2]], [[0, 1]], versions=torch.tensor([[1, 2]]))
    batch[name] = batch[name].to(torch.float16)
    with pytest.raises(RecordError, match=f"{name} are float16"):
        made(batch)


@pytest.mark.parametrize("name", ["input_ids", "loss_mask"])
def test_missing_column_is_named(name: str) -> None:
    batch = table([[1, 2]], [[0, 1]])
    del batch[name]
    with pytest.raises(RecordError, match=f"entry 0 has no {name}, only"):
        made(batch)
