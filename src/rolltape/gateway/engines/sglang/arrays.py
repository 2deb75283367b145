"""Arrays that SGLang sends as int32 in base64: routed experts of a mixture-of-experts model, and kept ids."""

import base64
import binascii
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.errors import EngineFault
from rolltape.gateway.engines.protocol import Generation
from rolltape.records.turn import Finish


class RoutedExperts:
    """Requests rows of new tokens only, once a complete answer has shown the width of a row.

    `shape` is (layers, experts per token), or None if unknown; rows are then flat.
    """

    def __init__(self, shape: tuple[int, int] | None = None) -> None:
        self._shape = shape
        self._width = None if shape is None else shape[0] * shape[1]

    def first_wanted(self, wanted: Generation) -> int:
        """The first token whose row the engine must send."""
        return 0 if self._width is None else wanted.held_tokens

    def side_array(self, encoded: str, wanted: Generation, sampled: int, first: int, where: str) -> dict[str, Any]:
        """The rows from the first token that is not held yet, as a side array."""
        # The last token was sampled but never fed to the model, so it has no experts.
        fed = len(wanted.prompt_ids) + sampled - 1
        values = _int32s(encoded, "routed_experts", where)
        if self._width is None and fed > 0 and len(values) and len(values) % fed == 0:
            self._width = len(values) // fed
        width = self._width or 1
        rows = len(values) // width
        if rows == fed:
            first = 0  # all rows: the server does not know routed_experts_start_len
        if rows * width != len(values) or rows != fed - first:
            raise EngineFault(
                f"{where}: {len(values)} routed experts, {width} a token, but {fed - first} tokens were fed"
            )
        shape = (rows, width) if self._shape is None else (rows, *self._shape)
        start = max(wanted.held_tokens, first)
        return {"start": start, "values": values.reshape(shape)[start - first :]}


def kept_side_arrays(
    encoded: tuple[str | None, str | None], wanted: Generation, sampled: int, finish: Finish, where: str
) -> dict[str, Any]:
    """The ids that top-p, top-k and min-p kept at each place, as a ragged side array.

    `encoded` has the ids of all places, and the offset of each place. An interrupted reply has neither.
    """
    ids, offsets = encoded
    if ids is None or offsets is None:
        if finish is Finish.ABORT or not sampled:
            return {}
        raise EngineFault(
            f"{where}: no top_p_token_ids, though kept ids were asked for; use SGLang with slime's patch for top-p, or "
            "sample with top-p 1"
        )
    values, ends = _int32s(ids, "top_p_token_ids", where), _int32s(offsets, "top_p_token_offsets", where)
    counts = np.diff(ends)
    if not len(ends) or ends[0] != 0 or ends[-1] != len(values) or (counts < 0).any():
        raise EngineFault(f"{where}: top_p_token_offsets do not divide the {len(values)} top_p_token_ids")
    if len(counts) == sampled:
        return {"kept_ids": {"start": len(wanted.prompt_ids), "values": values, "counts": counts}}
    if finish is Finish.ABORT:
        return {}
    raise EngineFault(f"{where}: top_p_token_offsets are of {len(counts)} ids, but {sampled} were sampled")


def _int32s(encoded: str, name: str, where: str) -> npt.NDArray[np.int32]:
    """Decode an array of int32 in base64."""
    try:
        return np.frombuffer(base64.b64decode(encoded, validate=True), dtype=np.int32)
    except (binascii.Error, ValueError) as error:
        raise EngineFault(f"{where}: {name} are no int32 in base64: {error}") from None
