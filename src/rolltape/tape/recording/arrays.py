"""Lists, numpy arrays and torch tensors → the arrays of a record, copied and checked. Torch is not imported."""

from array import array as packed
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rolltape.errors import MisalignedError, RecordError
from rolltape.records.jsonable import plain_scalar, shown
from rolltape.records.turn import NO_IDS, Ids, Logprobs, SideArray
from rolltape.tape.recording.fields import as_count, is_unicode

T = TypeVar("T", bound=np.generic)

_MAX_INT32 = 2**31 - 1


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
        raise RecordError(f"{where} is no array: {error}") from None


def as_ids(value: object, where: str) -> Ids:
    """Token ids as a private int32 array."""
    return as_whole_numbers(value, where, "a token id")


def as_whole_numbers(value: object, where: str, kind: str) -> Ids:
    """Whole numbers from 0 up as a private int32 array; `kind` says what each of them is."""
    # In both forms the least and the greatest are looked at, which for a short array costs a third of numpy's min.
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
    return RecordError(f"{where} holds no integers; {kind} is one")


def as_logprobs(value: object, where: str) -> tuple[Logprobs, bool]:
    """Logprobs as a private array, bit for bit what was given, and whether a NaN was among them.

    NaN stands for "none given", as `None` does in a list. float32 where it holds every value exactly, else float64.
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
            raise RecordError(f"{where} holds {_first_odd(array)}, no number; give logprobs, None where there is none")
        given_nan, has_nan = any(item != item for item in numbers), True
    elif array.dtype.kind not in "iu" and len(array):
        raise RecordError(f"{where} holds {_first_odd(array)}, no number; give logprobs, None where there is none")
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
            raise MisalignedError(f"{where}: {covered} rows but {sampled} sampled ids; say `start` if it covers others")
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
