"""Read the routed experts of a mixture-of-experts model, which SGLang gives as int32 in base64."""

from typing import Any

from rolltape.errors import EngineFault
from rolltape.gateway.engines.protocol import Generation
from rolltape.gateway.engines.sampled import int32s


class RoutedExperts:
    """Asks for rows of new tokens only, once a whole answer has shown how wide a row is.

    `shape` is (layers, experts per token); None: it is not known, and rows are kept flat.
    """

    def __init__(self, shape: tuple[int, int] | None = None) -> None:
        self._shape = shape
        self._width = None if shape is None else shape[0] * shape[1]

    def first_wanted(self, wanted: Generation) -> int:
        """From which token on rows are to be sent."""
        return 0 if self._width is None else wanted.held_tokens

    def side_array(self, encoded: str, wanted: Generation, sampled: int, first: int, where: str) -> dict[str, Any]:
        """The rows from the first token that is not held yet, as a side array."""
        # The last token was sampled but never fed, so that no experts saw it.
        fed = len(wanted.prompt_ids) + sampled - 1
        values = int32s(encoded, "routed_experts", where)
        if self._width is None and fed > 0 and len(values) and len(values) % fed == 0:
            self._width = len(values) // fed
        width = self._width or 1
        rows = len(values) // width
        if rows == fed:
            first = 0  # all of them, as from a server that does not know routed_experts_start_len
        if rows * width != len(values) or rows != fed - first:
            raise EngineFault(
                f"{where}: {len(values)} routed experts, {width} a token, but {fed - first} tokens were fed"
            )
        shape = (rows, width) if self._shape is None else (rows, *self._shape)
        start = max(wanted.held_tokens, first)
        return {"start": start, "values": values.reshape(shape)[start - first :]}
