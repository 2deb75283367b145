"""Checks and copies what a caller passes: single values, arrays of any library, and the sampled side of a turn.

Torch is not imported.
"""

import enum
from array import array as packed
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from rolltape.errors import MisalignedError, RecordError
from rolltape.records.jsonable import decode_numbers, encode_numbers, plain_scalar, shown, valid_text
from rolltape.records.turn import NO_IDS, Delivery, Ids, LogprobKind, Logprobs, Segment, SideArray, Turn, TurnFlag

E = TypeVar("E", bound=enum.StrEnum)
T = TypeVar("T", bound=np.generic)

_PLAIN = frozenset({float, bool, type(None)})
_LARGEST = 2**63 - 1
_MAX_INT32 = 2**31 - 1
_SEGMENT_FIELDS = {"sampled_ids", "logprobs", "weight_version"}


class TurnFields(TypedDict, total=False):
    """The arguments of `record_turn`. It needs `finish`, and a prompt: whole, or `after` with what is new."""

    after: Turn | str | None
    prompt_messages: Iterable[object] | None
    new_messages: Iterable[object] | None
    prompt_ids: object
    new_prompt_ids: object
    sampled_ids: object
    logprobs: object
    segments: Iterable[Mapping[str, Any]] | None
    reply: object
    weight_version: object
    tools: object  # a Root includes the template options
    template_options: Mapping[str, Any] | None
    sampling: Mapping[str, Any] | None
    sampling_asked: Mapping[str, Any] | None
    logprob_kind: LogprobKind | str | None
    model: str | None
    renderer: str | None
    fingerprint: str | None
    message_starts: object
    side_arrays: Mapping[str, Any] | None
    reward: object
    delivery: Delivery | str
    auxiliary: str | None
    flags: Iterable[TurnFlag | str] | None
    token_faithful: bool
    error: str | None
    started_at: float | None
    ended_at: float | None
    extra: Mapping[str, Any] | None


def as_member(kind: type[E], value: str, where: str) -> E:
    """A member of an enum, given as such or by its value."""
    if type(value) is kind:
        return value
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise RecordError(f"{where}: {shown(value)} is not a {kind.__name__}; known are {known}") from None


def as_text(value: object, where: str) -> str | None:
    """A text or None. Characters that are not valid Unicode are replaced."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise RecordError(f"{where} is {shown(value)}, a {type(value).__name__}; give a text")
    return valid_text(str.__str__(value))  # without the type of numpy's texts, which cannot be encoded


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogate, which cannot be encoded outside of Python."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_settings(value: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """A private copy of settings, plain numbers for the scalars of numpy and torch."""
    if value is None:
        return {}
    if type(value) is dict and all(
        type(key) is str and key.isascii() and key[:1] != "$" and _is_plain(item) for key, item in value.items()
    ):
        return value.copy()
    if not isinstance(value, Mapping):
        raise RecordError(f"{where} is a {type(value).__name__}; give a mapping")
    settings: dict[str, Any] = decode_numbers(encode_numbers(value, where))
    return settings


def _is_plain(item: object) -> bool:
    return type(item) in _PLAIN or (type(item) is int and -_LARGEST <= item <= _LARGEST)


def as_items(value: object, where: str, of: str) -> list[Any]:
    """The items of any iterable, also of an iterator, but not of a text or a mapping. `where` names them in errors."""
    if type(value) is list:
        return value.copy()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RecordError(f"{where} are {shown(value)}, a {type(value).__name__}; give a list of {of}")
    return list(value)


def as_texts(texts: Sequence[str], where: str) -> tuple[str, ...]:
    """Several texts. None is left out."""
    if isinstance(texts, str):
        raise RecordError(f"{where} are the text {texts!r}; give a list of texts")
    items = as_items(texts, where, "texts")
    return tuple(text for item in items if (text := as_text(item, f"{where}: one of them")) is not None)


def as_count(value: object, where: str) -> int:
    """A whole number that is not negative, also as a numpy scalar."""
    number = plain_scalar(value)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**63:
        raise RecordError(f"{where} is {shown(value)}; give a whole number from 0 up")
    return number


def as_version(value: object, where: str) -> str:
    """A weight version: a text, or a whole number as its text."""
    value = plain_scalar(value)
    if isinstance(value, bool) or not isinstance(value, str | int) or (isinstance(value, int) and abs(value) >= 2**63):
        raise RecordError(f"{where} is {shown(value)}; give a string")
    return value if isinstance(value, str) else str(value)


def as_snapshot(value: object, where: str) -> Any:
    """A private copy of any JSON value, plain numbers for the scalars of numpy and torch."""
    return None if value is None else decode_numbers(encode_numbers(value, where))


def as_array(value: object, where: str) -> npt.NDArray[Any]:
    """Any array-like as a numpy array; a torch tensor is detached and brought to the CPU first."""
    detach = None if type(value) is list else getattr(value, "detach", None)
    if callable(detach):
        tensor = detach().cpu()
        # numpy has no bfloat16; float32 holds all its values exactly.
        value = tensor.float().numpy() if "bfloat16" in str(tensor.dtype) else tensor.numpy()
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise RecordError(f"{where} is not an array: {error}") from None


def as_ids(value: object, where: str) -> Ids:
    """Token ids as a private int32 array."""
    return as_whole_numbers(value, where, "a token id")


def as_whole_numbers(value: object, where: str, kind: str) -> Ids:
    """Whole numbers from 0 up as a private int32 array. `kind` names one of them in errors."""
    # Both branches check the smallest and the largest number; for a short array argmin costs a third of numpy's min.
    if type(value) is list and set(map(type, value)) == {int}:
        if min(value) < 0 or max(value) > _MAX_INT32:
            raise _odd_number(value, where, kind)
        return _sealed(np.frombuffer(packed("i", value), np.int32))
    array = as_array(value, where)
    if array.ndim != 1:
        raise RecordError(f"{where} has {array.ndim} dimensions; give one row of whole numbers")
    if not len(array):
        return NO_IDS
    if array.dtype.kind not in "iu" or array[array.argmin()] < 0 or array[array.argmax()] > _MAX_INT32:
        raise _odd_number(value if isinstance(value, list | tuple) else array.tolist(), where, kind)
    if isinstance(value, list | tuple) and any(isinstance(item, bool | np.bool_) for item in value):
        raise _odd_number(value, where, kind)  # numpy takes True for 1
    return _sealed(array.astype(np.int32))


def _odd_number(items: Sequence[object], where: str, kind: str) -> RecordError:
    for at, item in enumerate(items):
        number = plain_scalar(item)
        if isinstance(number, bool) or not isinstance(number, int):
            return RecordError(f"{where}[{at}] is {shown(number)}, no integer; {kind} is one")
        if not 0 <= number <= _MAX_INT32:
            return RecordError(f"{where}[{at}] is {shown(number)}; {kind} lies in [0, {_MAX_INT32}]")
    return RecordError(f"{where} is an array of objects; give a list, or an array of an integer type")


def as_logprobs(value: object, where: str) -> tuple[Logprobs, bool]:
    """Logprobs as a private array, bit for bit what was given, and whether a NaN was among them.

    NaN means "none given", as `None` does in a list. The array is float32 if that holds every value exactly, else
    float64.
    """
    if type(value) is list and set(map(type, value)) == {float}:
        short = packed("f", value)
        if short.tolist() == value:
            return _sealed(np.frombuffer(short, np.float32)), False
    array = as_array(value, where)
    if array.ndim != 1:
        raise RecordError(f"{where} has {array.ndim} dimensions; give one number per sampled id")
    if array.dtype.kind == "f":
        given_nan = has_nan = len(array) > 0 and bool(np.isnan(array[array.argmin()]))  # the first NaN, if there is one
    elif array.dtype.kind == "O":
        numbers = [item for item in array.tolist() if item is not None]
        if not all(isinstance(item, int | float) for item in numbers):
            raise RecordError(f"{where} holds {_first_odd(array)}, not a number; give a logprob or None for each id")
        given_nan, has_nan = any(item != item for item in numbers), True
    elif array.dtype.kind not in "iu" and len(array):
        raise RecordError(f"{where} holds {_first_odd(array)}, not a number; give a logprob or None for each id")
    else:
        given_nan = has_nan = False
    if array.dtype == np.float32 and not has_nan:
        return _sealed(array.astype(np.float32)), False
    try:
        wide = array.astype(np.float64)
    except OverflowError:
        raise RecordError(f"{where} holds a number that is more than a float holds: {shown(value)}") from None
    if has_nan:
        wide[np.isnan(wide)] = np.nan  # one bit pattern for "none given"
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    exact = np.array_equal(narrow, wide, equal_nan=True) if has_nan else bool((narrow == wide).all())
    return _sealed(narrow) if exact else _sealed(wide), given_nan


def _sealed(array: npt.NDArray[T]) -> npt.NDArray[T]:
    array.setflags(write=False)
    return array


def as_side_arrays(value: Mapping[str, Any] | None, prompt: int, sampled: int, where: str) -> dict[str, SideArray]:
    """Side arrays by name. A bare array covers the sampled ids; a mapping may give `start` and `counts`."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RecordError(f"{where}: side_arrays are a {type(value).__name__}; give a mapping from name to array")
    for name in value:
        if not isinstance(name, str) or not is_unicode(name):
            raise RecordError(f"{where}: a side array has the name {shown(name)}; give a text")
    return {
        name: _as_side_array(given, prompt, sampled, f"{where}: side array {name!r}") for name, given in value.items()
    }


def _as_side_array(given: object, prompt: int, sampled: int, where: str) -> SideArray:
    if isinstance(given, SideArray):
        fields: dict[str, Any] = {"values": given.values, "start": given.start, "counts": given.counts}
    elif isinstance(given, Mapping):
        fields = dict(given)
    else:
        fields = {"values": given}
    if "values" not in fields or fields.keys() - {"values", "start", "counts"}:
        raise RecordError(f"{where} has the fields {sorted(map(str, fields))}; known are values, start, counts")
    values = np.array(as_array(fields["values"], where))
    if values.dtype.kind not in "biuf" or values.ndim == 0:
        raise RecordError(f"{where} has dtype {values.dtype} and {values.ndim} dimensions; give rows of numbers")
    counts = fields.get("counts")
    if counts is not None:
        counts = as_whole_numbers(counts, f"{where}: counts", "a count")
    if counts is not None and int(counts.sum()) != len(values):
        raise MisalignedError(f"{where}: counts add up to {int(counts.sum())} but there are {len(values)} values")
    covered = len(values) if counts is None else len(counts)
    start = fields.get("start")
    if start is None:
        if covered != sampled:
            raise MisalignedError(
                f"{where}: {covered} rows but {sampled} sampled ids; give `start` if it covers others"
            )
        start = prompt
    start = as_count(start, f"{where}: start")
    if start + covered > prompt + sampled:
        raise MisalignedError(f"{where}: covers [{start}, {start}+{covered}) of {prompt + sampled} tokens")
    values.setflags(write=False)
    return SideArray(start, values, counts)


def _first_odd(array: npt.NDArray[Any]) -> str:
    for item in array.tolist():
        if isinstance(item, bool) or not isinstance(item, int):
            return repr(item)
    return f"{array.dtype} values"


class Sampled(NamedTuple):
    """What the engine sampled."""

    ids: Ids
    logprobs: Logprobs | None  # None: none given at all
    segments: tuple[Segment, ...]
    had_nan: bool  # a logprob was NaN, which counts as none given


def as_sampled(fields: TurnFields, token_faithful: bool, where: str) -> Sampled:
    """A reply given as one piece, or as the segments that weight updates cut it into."""
    segments = fields.get("segments")
    if segments is None:
        ids, logprobs, had_nan = _ids_and_logprobs(
            fields.get("sampled_ids"), fields.get("logprobs"), token_faithful, where
        )
        version = _versions(fields.get("weight_version"), where)
        return Sampled(ids, logprobs, (Segment(0, len(ids), *version),), had_nan)
    if any(fields.get(name) is not None for name in _SEGMENT_FIELDS):
        raise RecordError(f"{where}: give segments, or sampled_ids with logprobs and weight_version, not both")
    return _joined(segments, token_faithful, where)


def ids_or_none(value: object, token_faithful: bool, where: str) -> Ids:
    """Ids. Only a turn whose engine returns none may lack them."""
    if value is None and token_faithful:
        raise RecordError(f"{where} is missing; an engine that gives no ids is recorded with token_faithful=False")
    return NO_IDS if value is None else as_ids(value, where)


def _ids_and_logprobs(
    sampled_ids: object, logprobs: object, token_faithful: bool, where: str
) -> tuple[Ids, Logprobs | None, bool]:
    """Ids and their logprobs (None if not given), and whether a logprob was NaN."""
    ids = ids_or_none(sampled_ids, token_faithful, f"{where}: sampled_ids")
    if logprobs is None:
        return ids, None, False
    given, had_nan = as_logprobs(logprobs, f"{where}: logprobs")
    if len(given) != len(ids):
        raise MisalignedError(
            f"{where}: {len(ids)} sampled ids but {len(given)} logprobs; ask the engine for logprobs on every token"
        )
    return ids, given, had_nan


def _joined(segments: Iterable[Mapping[str, Any]], token_faithful: bool, where: str) -> Sampled:
    ids: list[Ids] = []
    logprobs: list[Logprobs | None] = []
    parts: list[Segment] = []
    had_nan = False
    for index, segment in enumerate(as_items(segments, f"{where}: segments", "segments")):
        place = f"{where}, segment {index}"
        if not isinstance(segment, Mapping) or segment.keys() - _SEGMENT_FIELDS:
            raise RecordError(f"{place}: a segment has sampled_ids, logprobs and weight_version, not {shown(segment)}")
        own, own_logprobs, nan = _ids_and_logprobs(
            segment.get("sampled_ids"), segment.get("logprobs"), token_faithful, place
        )
        had_nan |= nan
        start = parts[-1].stop if parts else 0
        parts.append(Segment(start, start + len(own), *_versions(segment.get("weight_version"), place)))
        ids.append(own)
        logprobs.append(own_logprobs)
    joined_ids = np.concatenate([NO_IDS, *ids])
    joined_ids.setflags(write=False)
    if all(part is None for part in logprobs):
        return Sampled(joined_ids, None, tuple(parts), had_nan)
    joined: Logprobs = np.concatenate(
        [
            np.full(len(own), np.nan, np.float32) if part is None else part
            for own, part in zip(ids, logprobs, strict=True)
        ]
    )
    joined.setflags(write=False)
    return Sampled(joined_ids, joined, tuple(parts), had_nan)


def _versions(value: object, where: str) -> tuple[str | None, str | None]:
    """A weight version, a pair of versions that it lies between, or None if the engine did not report one."""
    if value is None or (type(value) is str and value.isascii()):
        return value, value
    first, last = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
    where = f"{where}: weight_version"
    return as_text(as_version(first, where), where), as_text(as_version(last, where), where)
