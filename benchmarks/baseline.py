"""The straightforward way: every prompt kept whole, messages compared as dictionaries, prefixes as lists."""

import copy
from typing import Any

from benchmarks.workload import Workload


class Node:
    """A message in a tree of messages, and the turn that it answered, if it is a reply."""

    def __init__(self, message: dict[str, Any] | None) -> None:
        self.message = message
        self.children: list[Node] = []
        self.turn: dict[str, Any] | None = None


def record(work: Workload) -> list[dict[str, Any]]:
    """One row per turn, holding its whole prompt."""
    ids: list[int] = work.ids.tolist()
    messages: list[dict[str, Any]] = []
    rows = []
    for turn in work.turns:
        messages += turn.messages
        rows.append(
            {
                "prompt_messages": copy.deepcopy(messages),
                "prompt_ids": ids[: turn.prompt_stop],
                "sampled_ids": ids[turn.prompt_stop : turn.reply_stop],
                "logprobs": turn.logprobs.tolist(),
                "reply": copy.deepcopy(turn.reply),
            }
        )
        messages.append(turn.reply)
    return rows


def tree_of(rows: list[dict[str, Any]]) -> Node:
    """Descend from the root by equality of messages, and hang each reply where its prompt ends."""
    root = Node(None)
    for row in rows:
        node = root
        for message in [*row["prompt_messages"], row["reply"]]:
            below = next((child for child in node.children if child.message == message), None)
            if below is None:
                below = Node(message)
                node.children.append(below)
            node = below
        node.turn = row
    return root


def samples_of(root: Node) -> list[dict[str, list[Any]]]:
    """One sample per branch, cut where a prompt does not extend what is held."""
    samples: list[dict[str, list[Any]]] = []
    stack = [(root, _new_sample())]
    while stack:
        node, sample = stack.pop()
        if node.turn is not None:
            sample = _extended(samples, sample, node.turn)
        if not node.children and sample["ids"]:
            samples.append(sample)
        stack.extend((child, sample if len(node.children) == 1 else copy.copy(sample)) for child in node.children)
    return samples


def _extended(
    samples: list[dict[str, list[Any]]], sample: dict[str, list[Any]], turn: dict[str, Any]
) -> dict[str, list[Any]]:
    held, prompt, reply = sample["ids"], turn["prompt_ids"], turn["sampled_ids"]
    if prompt[: len(held)] != held:
        samples.append(sample)
        sample, held = _new_sample(), []
    new = prompt[len(held) :]
    sample["ids"] = held + new + reply
    sample["trained_mask"] = sample["trained_mask"] + [False] * len(new) + [True] * len(reply)
    sample["logprobs"] = sample["logprobs"] + [0.0] * len(new) + turn["logprobs"]
    return sample


def _new_sample() -> dict[str, list[Any]]:
    return {"ids": [], "trained_mask": [], "logprobs": []}
