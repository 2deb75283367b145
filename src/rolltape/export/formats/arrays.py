"""Parts that formats share: per-token columns, routed experts, kept ids, version numbers, padding, tensors."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rolltape.errors import ExportError, MissingFormat
from rolltape.extras import import_extra
from rolltape.records.sample import Sample
from rolltape.records.turn import Logprobs

if TYPE_CHECKING:
    import torch

ROUTED_EXPERTS = "routed_experts"
KEPT_IDS = "kept_ids"  # the ids that top-p, top-k and min-p kept at each token
# [token, layer, expert]: a row for every token that was fed, which is all but the last.
Experts = npt.NDArray[np.int32]

_LARGEST_VERSION = 2**31 - 1


def logprobs_or_zero(sample: Sample) -> Logprobs:
    """The logprob of each trained token, bit for bit, and 0 on all others."""
    values: Logprobs = np.zeros_like(sample.logprobs)
    values[sample.trained_mask] = sample.logprobs[sample.trained_mask]
    return values


def advantages_or_zero(sample: Sample) -> npt.NDArray[np.float32]:
    """The sample's advantage on each trained token, and 0 on all others."""
    return np.where(sample.trained_mask, np.float32(sample.advantage or 0.0), np.float32(0))


def routed_experts(sample: Sample) -> Experts | None:
    """One row per token except the last, or None: not recorded, rows are flat, or a token that was fed has none."""
    side = sample.side.get(ROUTED_EXPERTS)
    if side is None or side.counts is not None or side.values.ndim != 3 or side.values.dtype.kind not in "iu":
        return None
    fed = len(sample.ids) - 1
    if any(start < fed for start, _ in side.missing):
        return None
    return side.values[:fed].astype(np.int32)


def all_routed_experts(samples: Sequence[Sample]) -> list[Experts] | None:
    """The experts of every sample, or None if a sample has none or shapes differ, so that none can be used."""
    found = [experts for experts in map(routed_experts, samples) if experts is not None]
    if not found or len(found) < len(samples) or len({experts.shape[1:] for experts in found}) > 1:
        return None
    return found


def places_without_kept_ids(sample: Sample) -> npt.NDArray[np.bool_]:
    """The tokens whose kept ids were not recorded."""
    side = sample.side.get(KEPT_IDS)
    if side is None or side.counts is None:
        return np.ones(len(sample.ids), np.bool_)
    lacking = np.zeros(len(sample.ids), np.bool_)
    for start, stop in side.missing:
        lacking[start:stop] = True
    return lacking


class VersionNumbers:
    """Numbers versions: all as the integers that they are, or all by their place among the announced ones."""

    def __init__(self, announced: Sequence[str] = ()) -> None:
        spelled = all(map(_is_number, announced))
        self._places = {} if spelled else {version: place for place, version in enumerate(announced)}

    def of_tokens(self, sample: Sample) -> npt.NDArray[np.int32]:
        """For each token the version that sampled it, or -1 if there is none or it is not known exactly."""
        known = [self._number(first, sample) if first == last else -1 for first, last in sample.versions]
        return np.array([*known, -1], dtype=np.int32)[sample.version_index]

    def bounds(self, sample: Sample) -> tuple[int, int] | None:
        """The oldest and the newest version that may have sampled a trained token, or None if none was given."""
        used = [sample.versions[index] for index in np.unique(sample.version_index[sample.trained_mask]) if index >= 0]
        if not used:
            return None
        oldest = min(self._number(first, sample) for first, _ in used)
        return oldest, max(self._number(last, sample) for _, last in used)

    def _number(self, version: str, sample: Sample) -> int:
        if not self._places and _is_number(version):
            return int(version)
        if version not in self._places:
            raise ExportError(
                f"sample {sample.id}: weight version {version!r} is neither a 32-bit integer nor an announced one; "
                "give versions=run.versions()"
            )
        return self._places[version]


def _is_number(version: str) -> bool:
    return version.isascii() and version.isdigit() and int(version) <= _LARGEST_VERSION


def padded(
    rows: Sequence[npt.NDArray[Any]],
    dtype: npt.DTypeLike,
    *,
    fill: float = 0,
    width: int | None = None,
    on_the_left: bool = False,
) -> npt.NDArray[Any]:
    """Rows of different lengths as one array, `fill` after each, or before it; trailing shapes are kept."""
    widest = max(len(row) for row in rows) if width is None else width
    lines = np.full((len(rows), widest, *rows[0].shape[1:]), fill, dtype=dtype)
    for line, row in zip(lines, rows, strict=True):
        start = widest - len(row) if on_the_left else 0
        line[start : start + len(row)] = row
    return lines


def as_tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, "torch.Tensor"]:
    """The same columns as tensors that share their memory."""
    torch = torch_module()
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def torch_module() -> ModuleType:
    """torch, if it is installed."""
    return import_extra("torch", "torch", what="this format", missing=MissingFormat)
