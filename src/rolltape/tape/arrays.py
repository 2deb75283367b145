"""Lists, numpy arrays and torch tensors → the arrays of a record, copied and checked. Torch is not imported."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.errors import MisalignedError, RecordError
from rolltape.records.tokens import NO_IDS, Ids
from rolltape.records.turn import Logprobs, SideArray

_MAX_ID = 2**31 - 1
_any_bits = np.bitwise_or.reduce


def as_array(value: object, where: str) -> npt.NDArray[Any]:
    """Any array-like as a numpy array; a torch tensor is detached and brought to the CPU first."""
    detach = None if type(value) is list else getattr(value, "detach", None)
    if callable(detach):
        tensor = detach().cpu()
        # numpy has no bfloat16; float32 holds all its values exactly.
        value = tensor.float().numpy() if "bfloat16" in str(tensor.dtype) else tensor.numpy()
    try:
        return np.asarray(value)
    except ValueError as error:
        raise RecordError(f"{where} is no array: {error}") from None


def as_ids(value: object, where: str) -> Ids:
    """Token ids as a private int32 array."""
    array = as_array(value, where)
    if array.ndim != 1:
        raise RecordError(f"{where} has {array.ndim} dimensions; give one row of ids")
    if not len(array):
        return NO_IDS
    if array.dtype.kind not in "iu":
        raise RecordError(f"{where} holds {_first_odd(array)}, no integer; give token ids")
    # Their bits together are in range exactly if all of them are: one pass, and a third of the time of min and max.
    if not 0 <= int(_any_bits(array)) <= _MAX_ID:
        at = int(array.argmin()) if int(array.min()) < 0 else int(array.argmax())
        raise RecordError(f"{where}[{at}] is {int(array[at])}; a token id lies in [0, {_MAX_ID}]")
    return _private(array.astype(np.int32))


def _private(ids: Ids) -> Ids:
    ids.setflags(write=False)
    return ids


def as_logprobs(value: object, where: str) -> tuple[Logprobs, bool]:
    """Logprobs as a private array, bit for bit what was given, and whether a NaN was among them.

    NaN stands for "none given", as `None` does in a list. float32 where it holds every value exactly, else float64.
    """
    array = as_array(value, where)
    if array.ndim != 1:
        raise RecordError(f"{where} has {array.ndim} dimensions; give one number per sampled id")
    if array.dtype.kind == "f":
        given_nan = bool(np.isnan(array.sum())) and bool(np.isnan(array).any())
    elif array.dtype.kind == "O":
        numbers = [item for item in array.tolist() if item is not None]
        if not all(isinstance(item, int | float) for item in numbers):
            raise RecordError(f"{where} holds {_first_odd(array)}, no number; give logprobs, None where there is none")
        given_nan = any(item != item for item in numbers)
    elif array.dtype.kind not in "iu" and len(array):
        raise RecordError(f"{where} holds {_first_odd(array)}, no number; give logprobs, None where there is none")
    else:
        given_nan = False
    wide = array.astype(np.float64)
    has_nan = given_nan or array.dtype.kind == "O"
    if has_nan:
        wide[np.isnan(wide)] = np.nan  # one bit pattern for "none given"
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    exact = np.array_equal(narrow, wide, equal_nan=True) if has_nan else bool((narrow == wide).all())
    logprobs: Logprobs = narrow if exact else wide
    logprobs.setflags(write=False)
    return logprobs, given_nan


def as_side_arrays(value: Mapping[str, Any] | None, prompt: int, sampled: int, where: str) -> dict[str, SideArray]:
    """Side arrays by name. A bare array covers the sampled ids; a mapping may give `start` and `counts`."""
    if not value:
        return {}
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
        raise RecordError(f"{where} has the fields {sorted(fields)}; known are values, start, counts")
    values = np.array(as_array(fields["values"], where))
    if values.dtype.kind not in "biuf" or values.ndim == 0:
        raise RecordError(f"{where} has dtype {values.dtype} and {values.ndim} dimensions; give rows of numbers")
    counts = None if fields.get("counts") is None else as_ids(fields["counts"], f"{where}: counts")
    if counts is not None and int(counts.sum()) != len(values):
        raise MisalignedError(f"{where}: counts add up to {int(counts.sum())} but there are {len(values)} values")
    covered = len(values) if counts is None else len(counts)
    start = fields.get("start")
    if start is None:
        if covered != sampled:
            raise MisalignedError(f"{where}: {covered} rows but {sampled} sampled ids; say `start` if it covers others")
        start = prompt
    if not isinstance(start, int) or start < 0 or start + covered > prompt + sampled:
        raise MisalignedError(f"{where}: covers [{start}, {start}+{covered}) of {prompt + sampled} tokens")
    values.setflags(write=False)
    return SideArray(start, values, counts)


def _first_odd(array: npt.NDArray[Any]) -> str:
    for item in array.tolist():
        if isinstance(item, bool) or not isinstance(item, int):
            return repr(item)
    return f"{array.dtype} values"
