"""How rollouts stand, in brief: fixed fields, so that those of a hundred thousand are read and checked as one array."""

import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.errors import DamagedTapeError
from rolltape.records.ids import digest_of
from rolltape.records.rollout import RolloutHead, Status

_FIELDS = {
    "key": ("S24", 0),  # rollout and try together
    "id": ("S16", 0),
    "try_index": ("<u8", 16),
    "step": ("<u8", 24),
    "source": ("<u8", 32),  # as `source_mark` has it
    "attempt": ("<u8", 40),  # the same for all seats of one attempt
    "row": ("<u4", 48),  # of the rollout in its journal; 0 in a shard
    "status": ("u1", 52),
    "rewarded": ("?", 53),
    "check": ("<u8", 56),
}
STANDING = np.dtype(
    {
        "names": list(_FIELDS),
        "formats": [kind for kind, _ in _FIELDS.values()],
        "offsets": [offset for _, offset in _FIELDS.values()],
    }
)
CODES = {Status.RUNNING: 0, Status.FINISHED: 1, Status.FAILED: 2, Status.LOST: 3}
STATUSES = {code: status for status, code in CODES.items()}
NO_STANDINGS: npt.NDArray[Any] = np.empty(0, STANDING)

# Which of some standings are wanted, as an array of truth values; None: all.
Wanted = Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]] | None

_ID_BYTES = 16
_PACKED = struct.Struct("<16sQQQQIB?xx")
_WORDS = struct.Struct("<7Q")
# Any bit that changes changes their sum, since each is odd; a word in the place of another does, since they differ.
_WEIGHTS = [0x9E3779B97F4A7C15 * (2 * place + 1) % 2**64 for place in range(7)]


def packed(head: RolloutHead, status: Status, *, rewarded: bool, row: int = 0) -> bytes:
    """A rollout's standing as it is stored."""
    attempt = _mark(head.task_id or head.group, str(head.attempt))
    fields = (head.try_index, head.step, source_mark(head.source), attempt, row, CODES[status], rewarded)
    stored = _PACKED.pack(bytes.fromhex(head.id), *fields)
    check: int = sum(word * weight for word, weight in zip(_WORDS.unpack(stored), _WEIGHTS, strict=True)) % 2**64
    return stored + check.to_bytes(8, "little")


def unpacked(standings: bytes | memoryview) -> npt.NDArray[Any]:
    """Stored standings as an array of STANDING; raises DamagedTapeError if one of them was changed."""
    found = np.frombuffer(standings, STANDING)
    words = found.view("<u8").reshape(len(found), 8)
    checks = (words[:, :7] * np.array(_WEIGHTS, np.uint64)).sum(axis=1, dtype=np.uint64)
    if not np.array_equal(checks, words[:, 7]):
        raise DamagedTapeError(f"{int((checks != words[:, 7]).sum())} of {len(found)} standings are damaged")
    return found


def gathered(standings: Iterable[npt.NDArray[Any]], wanted: Wanted = None) -> npt.NDArray[Any]:
    """Those of standings that are wanted, as one array."""
    return np.concatenate([NO_STANDINGS, *(some if wanted is None else some[wanted(some)] for some in standings)])


def told(standing: bytes) -> tuple[Status | None, bool]:
    """The status that a rollout's finish says, if it has one, and whether it is rewarded."""
    *_, code, rewarded = _PACKED.unpack(standing[: _PACKED.size])
    status = STATUSES[code]
    return (status if status in (Status.FINISHED, Status.FAILED) else None), rewarded


def source_mark(source: str | None) -> int:
    """What tells a source from others in a standing."""
    return _mark(source)


def key_of(rollout: str, try_index: int) -> bytes:
    """A rollout and try as the key of a standing; raises ValueError for what is no id of a rollout."""
    own_id = bytes.fromhex(rollout)
    if len(own_id) != _ID_BYTES:
        raise ValueError(f"{rollout!r} is no id of a rollout")
    return own_id + try_index.to_bytes(8, "little")


def _mark(*fields: str | None) -> int:
    return int.from_bytes(digest_of(*fields)[:8], "little")
