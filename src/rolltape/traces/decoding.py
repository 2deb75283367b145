"""Token ids → text, all stretches of a batch in one call; special tokens stay visible."""

from collections.abc import Callable, Sequence
from typing import Any

from rolltape.errors import RecordError
from rolltape.records.jsonable import shown

Stretches = Sequence[Sequence[int]]


def decoded(tokenizer: Any, stretches: Stretches) -> list[str]:
    """The text of each stretch of ids. One that the tokenizer refuses is spelled as its numbers."""
    decode = _decoder(tokenizer)
    try:
        return decode(stretches)
    except Exception:  # noqa: BLE001 - tokenizers raise what they like for an id that they do not have
        return [_alone(decode, stretch) for stretch in stretches]


def _decoder(tokenizer: Any) -> Callable[[Stretches], list[str]]:
    """What decodes many stretches at once, for a tokenizer of transformers or tokenizers, or a function of ids."""
    if hasattr(tokenizer, "batch_decode"):
        return lambda many: list(
            tokenizer.batch_decode(many, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
    if hasattr(tokenizer, "decode_batch") and hasattr(tokenizer, "id_to_token"):  # tiktoken has the first alone
        return lambda many: list(tokenizer.decode_batch(many, skip_special_tokens=False))
    one = tokenizer.decode if hasattr(tokenizer, "decode") else tokenizer
    if not callable(one):
        raise RecordError(f"the tokenizer is {shown(tokenizer)}; give one of transformers or tokenizers, or a function")
    return lambda many: [str(one(stretch)) for stretch in many]


def _alone(decode: Callable[[Stretches], list[str]], stretch: Sequence[int]) -> str:
    try:
        return decode([stretch])[0]
    except Exception:  # noqa: BLE001 - as above, and now it is known of which stretch
        return " ".join(f"#{token}" for token in stretch)
