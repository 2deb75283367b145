"""Answers of a server over runs that nobody recorded: as many rows, turns and tokens as a test asks for."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt


def row(index: int) -> dict[str, Any]:
    """The row of the table at a place."""
    return {
        "id": f"{index:032x}", "try": 0, "short": f"{index:08x}", "step": index // 1000, "task": f"task-{index}",
        "attempt": index % 8, "group": f"{index // 8:032x}", "environment": "made-up", "agent": "chat", "model": "none",
        "status": "finished", "stop_reason": "completed", "reason": None, "reward": index % 11 / 10, "turns": 10,
        "sampled_tokens": 1000 + index, "trained_tokens": 900, "branches": 1, "forks": index % 3, "tags": [],
        "filter": None, "started_ns": 1, "ended_ns": 2, "live": False,
    }  # fmt: skip


def rows(total: int, offset: int, limit: int) -> dict[str, Any]:
    shown = [row(index) for index in range(offset, min(total, offset + limit))]
    progress = dict.fromkeys(("indexed", "total", "ended", "summarized", "searchable"), total)
    return {"total": total, "matched": total, "rows": shown, "snapshot": 1, "progress": progress}


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "text": text, "key": f"{role}:{text}", "digest": "0" * 32}


def rollout(turns: int, forks: int) -> dict[str, Any]:
    """A session whose every n-th turn leaves the one before the last, so that branches lie side by side."""
    every = turns // forks if forks else turns + 1
    made: list[dict[str, Any]] = []
    departures: list[dict[str, Any]] = []
    for sequence in range(turns):
        forked = sequence > 1 and sequence % every == 0
        parent = None if sequence == 0 else f"s.{sequence - 2 if forked else sequence - 1}"
        made.append(
            {
                "id": f"s.{sequence}", "sequence": sequence, "parent": parent,
                "started_ns": None, "ended_ns": None, "finish": "stop", "prompt_tokens": 10 * sequence,
                "new_prompt_tokens": 10, "sampled_tokens": 5, "reply": message("assistant", f"reply {sequence}"),
                "new_messages": [message("user", f"question {sequence}")], "kept_messages": None, "versions": [],
                "delivery": "delivered", "flags": [], "auxiliary": None, "reward": None, "fates": {"trained": 5},
            }
        )  # fmt: skip
        if forked:
            departures.append(
                {
                    "turn": f"s.{sequence}", "parent": f"s.{sequence - 1}", "cause": "retry",
                    "first_difference": None,
                }
            )  # fmt: skip
    branch = {"leaf": made[-1]["id"], "main": True}
    return {
        "row": row(0), "head": {}, "outcome": {}, "events": [], "trace": None,
        "sessions": [{"id": "s", "turns": made, "branches": [branch], "forks": departures, "tools": []}],
        "samples": [], "policy": "exact", "ledger": {"trained": 5 * turns}, "tries": [0],
    }  # fmt: skip


def tokens(count: int, worst: int) -> bytes:
    """A sample of so many tokens, of which one has by far the largest mismatch."""
    chance = np.random.default_rng(5)
    words = [f" word{index}".encode() if index % 17 else b".\n" for index in range(count)]
    sampled = (np.arange(count) % 1000 >= 300).astype(np.uint8)
    logprob = np.where(sampled == 1, -chance.exponential(0.4, count), np.nan).astype(np.float32)
    mismatch = np.where(sampled == 1, chance.exponential(1e-4, count), np.nan).astype(np.float32)
    mismatch[worst] = 3.5
    columns: dict[str, npt.NDArray[Any]] = {
        "ids": np.arange(count, dtype=np.int32),
        "trained": sampled,
        "sampled": sampled,
        "logprob": logprob,
        "version": np.zeros(count, np.int32),
        "mismatch_kl": mismatch,
        "text_offsets": np.concatenate([[0], np.cumsum([len(word) for word in words])]).astype(np.int32),
        "text_utf8": np.frombuffer(b"".join(words), np.uint8),
    }
    kinds = {"int32": "i4", "float32": "f4", "uint8": "u1"}
    body, described = b"", []
    for name, values in columns.items():
        body += bytes(-len(body) % 8)
        described.append({"name": name, "dtype": kinds[str(values.dtype)], "offset": len(body), "length": len(values)})
        body += values.tobytes()
    edges = [edge for start in range(0, count, 1000) for edge in (start, min(count, start + 300))] + [count]
    spans = [
        {
            "start": start, "stop": stop, "origin": "sampled" if index % 2 else "prompt", "turn": f"s.{index // 2}",
            "turn_sequence": index // 2, "session": "s", "role": "assistant" if index % 2 else "user",
            "messages": [index, index + 1], "fate": "trained" if index % 2 else None,
        }
        for index, (start, stop) in enumerate(pairwise(edges))
        if stop > start
    ]  # fmt: skip
    sample = {"id": "0", "index": 0, "reward": 1.0, "advantage": 0.5, "loss_weight": 1.0, "trained": int(sampled.sum())}
    header = {"n": count, "columns": described, "spans": spans, "versions": ["7"], "sample": sample, "missing": []}
    packed = json.dumps(header).encode()
    return len(packed).to_bytes(8, "little") + packed + bytes(-(8 + len(packed)) % 8) + body
