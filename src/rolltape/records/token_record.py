"""A token record: one sequence as the trainer saw it, in aligned per-token columns."""

import enum
from collections.abc import Callable, Collection
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import MisalignedError, RecordError
from rolltape.records.sample import Sample, Span
from rolltape.records.turn import Ids

TOKEN_SCHEMA = "rolltape.token/1"  # a column may be added; a change of meaning raises the version

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Int32 = Annotated[int, np.int32]  # an int that files hold in 32 bits; a plain int takes 64


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One sequence of one micro-batch, as the trainer saw it.

    All per-token columns have the length of `ids`. A column that is None was not given, and could not be computed
    from what was. With r = trainer logprob − inference logprob:

    - `log_ratio` is r, `ratio` is exp(r), and `mismatch_kl` is exp(r) − r − 1;
    - `prob_delta` is exp(trainer logprob) − exp(inference logprob).

    Records are written by `rolltape.tokens.TokenExporter` and read by `rolltape.tokens.read_tokens`:

        for record in read_tokens("runs/exp1", step=12):
            ratios = record.ratio[record.trained_mask]
            print(record.place, record.sample, len(record), ratios.max())

    The fields below are also the columns of the files, in this order.
    """

    step: int
    rank: Int32
    micro_step: Int32
    micro_sequence: Int32  # its place in the micro-batch
    sequence: Int32  # its place among the records of this step and rank
    epoch: Int32 = 0  # which pass over the step's samples, where a step makes several
    sample: str | None = None
    rollout: str | None = None
    group: str | None = None
    env: str | None = None
    versions: tuple[str, ...] = ()  # weight versions that sampled it, as given to the trainer
    reward: float | None = None  # None: none given, or given per token
    loss_weight: float | None = None  # of the sequence among those of its rollout; None: none given
    loss: str | None = None  # the loss specification as JSON; None: none given
    ids: Ids
    position_ids: Ids
    trained_mask: Flags
    masked: Flags | None = None  # trained, but the loss ignores it: its gradient is zero
    masked_high: Flags | None = None  # because its probability rose too far
    masked_low: Flags | None = None  # because its probability fell too far
    advantages: Floats | None = None
    rewards: Floats | None = None
    entropy: Floats | None = None
    inference_logprobs: Floats | None = None
    trainer_logprobs: Floats
    old_logprobs: Floats | None = None  # what a clipped loss compares with, where that is not the inference logprob
    reference_logprobs: Floats | None = None
    log_ratio: Floats | None = None
    ratio: Floats | None = None
    mismatch_kl: Floats | None = None
    prob_delta: Floats | None = None
    rl_weights: Floats | None = None
    ce_weights: Floats | None = None
    ref_kl_weights: Floats | None = None

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in self.columns().items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise MisalignedError(f"token record {self.place}: columns differ in length: {listed}")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def place(self) -> str:
        """Its name within a run: step, rank and sequence."""
        return f"{self.step}.{self.rank}.{self.sequence}"

    @property
    def trained_tokens(self) -> int:
        return int(np.count_nonzero(self.trained_mask))

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The per-token columns that it has, by name."""
        named = ((name, getattr(self, name)) for name in TOKEN_COLUMNS)
        return {name: values for name, values in named if values is not None}

    def spans_in(self, sample: Sample) -> tuple[Span, ...]:
        """The spans of its sample, as far as the record reaches. Raises RecordError if the ids differ."""
        length = min(len(self), len(sample.ids))
        differing = np.flatnonzero(self.ids[:length] != sample.ids[:length])
        if len(differing) or len(self) > length:
            at = int(differing[0]) if len(differing) else length
            raise RecordError(
                f"token record {self.place}: differs from sample {sample.id} at token {at} of {len(self)}; "
                "check that the trainer's sample_ids belong to these sequences"
            )
        within = (span for span in sample.spans if span.start < length)
        return tuple(msgspec.structs.replace(span, stop=min(span.stop, length)) for span in within)


class StepFiles(NamedTuple):
    """Facts about a step's files that decide which samples are missing from them."""

    complete: bool  # a trainer wrote them, and all of them are there
    includes: Callable[[str], bool]  # whether the record of a sample would have been written
    elsewhere: Callable[[], Collection[str]]  # the samples that records of other steps name
    written_at_ns: int | None = None  # when the last of them was there; None: not known


class Shape(enum.Enum):
    """How many values a column has per record."""

    SCALAR = enum.auto()
    LIST = enum.auto()
    PER_TOKEN = enum.auto()


class TokenColumn(NamedTuple):
    """A field of a token record as files hold it."""

    name: str
    dtype: type[np.generic] | type[str]  # of one value
    shape: Shape
    optional: bool  # whether it may be None


def _declared_columns() -> dict[str, TokenColumn]:
    """The fields of TokenRecord, read from their annotations; `| None` makes a field optional."""
    dtypes: dict[Any, Any] = {int: np.int64, float: np.float64, str: str, Int32: np.int32}
    columns = {}
    for name, annotation in get_type_hints(TokenRecord, include_extras=True).items():
        optional = isinstance(annotation, UnionType)
        kind = get_args(annotation)[0] if optional else annotation
        if get_origin(kind) in (np.ndarray, npt.NDArray):  # the second since numpy 2.5, from Python 3.12 on
            inner = get_args(kind)[-1]
            dtype, shape = (get_args(inner) or (inner,))[0], Shape.PER_TOKEN
        elif get_origin(kind) is tuple:
            dtype, shape = dtypes[get_args(kind)[0]], Shape.LIST
        else:
            dtype, shape = dtypes[kind], Shape.SCALAR
        columns[name] = TokenColumn(name, dtype, shape, optional)
    return columns


_DECLARED = _declared_columns()
FACT_COLUMNS = {name: column for name, column in _DECLARED.items() if column.shape is not Shape.PER_TOKEN}
TOKEN_COLUMNS = {name: column for name, column in _DECLARED.items() if column.shape is Shape.PER_TOKEN}
