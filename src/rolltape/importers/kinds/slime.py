"""slime's samples: the files of --save-debug-rollout-data, and samples as JSON lines.

Samples of one rollout, which share its `rollout_id`, are its sessions. The ids that `loss_mask` trains were sampled.
slime does not record which of the other ids the model sampled.
"""

import pickle
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rolltape.errors import ImportFileError, MissingExtra
from rolltape.extras import import_extra
from rolltape.importers.files import first_file, first_object, json_lines, of_each_file
from rolltape.importers.imported import (
    BrokenEntry,
    Found,
    ImportedRollout,
    ImportedSession,
    ImportOptions,
    or_broken,
    token_turns,
)
from rolltape.records.rollout import StopReason

_FINISH = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "error", "pending": "abort"}
_KEPT = ("label", "metadata", "train_metadata", "session_id", "remove_sample", "spec_info", "prefix_cache_info")


def recognize(path: Path) -> str | None:
    """Samples with `tokens` and `response_length`."""
    if path.is_dir():
        file = first_file(path, ".pt") or first_file(path, ".jsonl", ".ndjson")
        return recognize(file) if file is not None else None
    if path.suffix == ".pt":
        try:
            saved = _load_torch_file(path)
        except (ImportFileError, MissingExtra):
            return None
        samples = saved.get("samples") if isinstance(saved, Mapping) else None
        first = samples[0] if isinstance(samples, list) and samples else None
        return "saved samples" if isinstance(first, Mapping) and "tokens" in first else None
    row = first_object(path) if path.suffix in (".jsonl", ".ndjson") else None
    return "rows with tokens and response_length" if row and {"tokens", "response_length"} <= row.keys() else None


def find(path: Path, options: ImportOptions) -> Found:
    """One rollout per `rollout_id`. A sample without a `rollout_id` is a separate rollout."""
    return of_each_file(path, ".pt", ".jsonl", ".ndjson", read=partial(_file_rollouts, options=options))


def _file_rollouts(file: Path, options: ImportOptions) -> Found:
    samples: list[tuple[str, dict[str, Any]]] = []
    evaluation, step = file.stem.startswith("eval_"), options.step
    if file.suffix == ".pt":
        saved = _load_torch_file(file)
        if not isinstance(saved, Mapping) or not isinstance(saved.get("samples"), list):
            yield BrokenEntry(str(file), "no object with a list of samples")
            return
        step = options.step if options.step is not None else saved.get("rollout_id")
        samples = [(f"{file}, sample {at}", one) for at, one in enumerate(saved["samples"], 1)]
    else:
        for entry in json_lines(file):
            if isinstance(entry, BrokenEntry):
                yield entry
            else:
                samples.append(entry)
    yield from _rollouts(samples, step if isinstance(step, int) else 0, evaluation, options)


def _rollouts(samples: list[tuple[str, dict[str, Any]]], step: int, evaluation: bool, options: ImportOptions) -> Found:
    rollouts: dict[object, list[tuple[str, dict[str, Any]]]] = {}
    for number, (where, sample) in enumerate(samples):
        own = sample.get("rollout_id") if isinstance(sample, Mapping) else None
        rollouts.setdefault(own if isinstance(own, int | str) else ("alone", number), []).append((where, sample))
    for parts in rollouts.values():
        yield or_broken(parts[0][0], partial(_rollout, parts, step, evaluation, options))


def _rollout(
    parts: list[tuple[str, dict[str, Any]]], step: int, evaluation: bool, options: ImportOptions
) -> ImportedRollout:
    where, first = parts[0]
    sessions = [_session(sample, place, options) for place, sample in parts]
    reward, terms = _reward(first.get("reward"), where)
    status = str(first.get("status", "completed"))
    failed = f"slime: {status}" if status in ("aborted", "failed", "pending") else None
    split = options.split or ("eval" if evaluation else None)
    has_logprobs = all(sample.get("rollout_log_probs") is not None for _, sample in parts)
    has_versions = all(sample.get("weight_versions") for _, sample in parts)
    absent = (() if has_logprobs else ("logprobs",)) + (() if has_versions else ("weight versions",))
    prompt = first.get("prompt") or list(first["tokens"][: len(first["tokens"]) - first["response_length"]])
    index = first.get("rollout_id") if first.get("rollout_id") is not None else first.get("index")
    return ImportedRollout(
        where=where,
        sessions=sessions,
        foreign_ids=() if index is None else (f"slime-{split or 'train'}-{step}-{index}",),
        task={"prompt": prompt, "label": first.get("label")},
        **options.origin(split=split, step=step),
        reward=reward if failed is None else None,
        reward_terms=terms,
        stop_reason=StopReason.MAX_TOKENS if status == "truncated" else StopReason.COMPLETED,
        failed=failed,
        absent=absent,
    )


def _session(sample: Mapping[str, Any], where: str, options: ImportOptions) -> ImportedSession:
    tokens: Any = sample.get("tokens")
    length = sample.get("response_length")
    if not (isinstance(tokens, list | tuple) or hasattr(tokens, "tolist")) or not isinstance(length, int):
        raise ImportFileError(f"{where}: a sample has tokens, a list of ids, and response_length, a number")
    ids = [int(token) for token in tokens]
    mask = sample.get("loss_mask")
    mask = [1] * length if mask is None else list(mask)
    if len(mask) != length:
        raise ImportFileError(f"{where}: response_length is {length}, but loss_mask has {len(mask)} values")
    prompt = sample.get("prompt") or ()
    response = sample.get("response")
    versions = list(dict.fromkeys(map(str, sample.get("weight_versions") or ())))
    turns = token_turns(
        ids,
        mask,
        where=where,
        logprobs=sample.get("rollout_log_probs"),
        finish=_FINISH.get(str(sample.get("status")), "stop"),
        prompt_messages=[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        reply=None if response is None else {"role": "assistant", "content": response},
        # slime lists versions without places. With several, the version of a token is not known.
        weight_version=versions[0] if len(versions) == 1 else None,
    )
    extra = {name: sample[name] for name in _KEPT if sample.get(name) is not None}
    if len(versions) > 1:
        extra["weight_versions"] = versions
    if response is not None and len(turns) > 1:
        extra["response"] = response
    return ImportedSession(turns=turns, tokenizer=options.tokenizer, extra=extra)


def _reward(value: object, where: str) -> tuple[float | None, dict[str, float]]:
    """A number, or an object of numbers: its `score` or `reward` is the reward, the rest are its terms."""
    if value is None or isinstance(value, int | float):
        return None if value is None else float(value), {}
    if not isinstance(value, Mapping):
        raise ImportFileError(
            f"{where}: its reward is a {type(value).__name__}; a number or an object of numbers is known"
        )
    terms = {str(name): float(term) for name, term in value.items() if isinstance(term, int | float)}
    named = next((name for name in ("reward", "score") if name in terms), None)
    return (terms.get(named) if named else None), terms


def _load_torch_file(path: Path) -> Any:
    """The value of a file of `torch.save`, if it contains only numbers, texts, lists, dicts, tensors and arrays.

    Pickled code in it is not run.
    """
    torch = import_extra("torch", "torch")
    plain: list[Any] = [
        np.dtype,
        np.ndarray,
        *(type(np.dtype(name)) for name in ("f2", "f4", "f8", "i4", "i8", "u1", "?")),
    ]
    rebuilding = [np._core.multiarray._reconstruct, np._core.multiarray.scalar]  # type: ignore[attr-defined]
    try:
        with torch.serialization.safe_globals([*plain, *rebuilding]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = _first_line(error)
        raise ImportFileError(
            f"{path}: it holds Python objects, and reading them would run code of the file ({first}). "
            "Convert the file to JSON lines where you trust it"
        ) from None
    except FileNotFoundError:
        raise ImportFileError(f"{path}: there is no such file; check the path") from None
    except (EOFError, OSError, RuntimeError, zipfile.BadZipFile) as error:
        raise ImportFileError(f"{path}: not a file that torch.save wrote: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "it is empty or cut short")
