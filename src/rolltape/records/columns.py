"""The columns of a record's files, read from the annotations of its class: a field is declared once, there."""

import enum
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np

Int32 = Annotated[int, np.int32]  # an int that files hold in 32 bits; a plain int takes 64

_NUMBERS: dict[Any, type[np.generic]] = {int: np.int64, float: np.float64, bool: np.bool_}


class Shape(enum.Enum):
    """How many values a column has per record."""

    SCALAR = enum.auto()
    LIST = enum.auto()
    PER_TOKEN = enum.auto()


class Column(NamedTuple):
    """One field of a record as a file holds it."""

    name: str
    dtype: type[np.generic] | type[str]  # of one value
    shape: Shape
    optional: bool  # whether it may be None


def declared_columns(record: type) -> dict[str, Column]:
    """The columns of a record class by name, in the order of its fields.

    A field is a number, text, a tuple of these, or a numpy array with a value per token; with `| None` it is optional.
    """
    hints = get_type_hints(record, include_extras=True)
    return {name: _column(name, hints[name]) for name in record.__struct_fields__}  # type: ignore[attr-defined]


def _column(name: str, annotation: Any) -> Column:
    optional = isinstance(annotation, UnionType)
    if optional:
        (annotation,) = (option for option in get_args(annotation) if option is not type(None))
    if get_origin(annotation) is np.ndarray:
        (dtype,) = get_args(get_args(annotation)[1])
        return Column(name, dtype, Shape.PER_TOKEN, optional)
    if get_origin(annotation) is tuple:
        return Column(name, _value_dtype(get_args(annotation)[0]), Shape.LIST, optional)
    return Column(name, _value_dtype(annotation), Shape.SCALAR, optional)


def _value_dtype(annotation: Any) -> type[np.generic] | type[str]:
    if get_origin(annotation) is Annotated:
        dtype: type[np.generic] = annotation.__metadata__[0]
        return dtype
    return str if annotation is str else _NUMBERS[annotation]
