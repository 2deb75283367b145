"""Colors tokens by a value: the available values, their scales, and the colors or marks for them."""

import enum
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rich.color import ColorSystem
from rich.style import Style

from rolltape.cli.screen import count, number, plural, visible
from rolltape.errors import UsageError
from rolltape.records.sample import Sample
from rolltape.records.token_record import TokenRecord
from rolltape.samples.spelling import PART, Spell, marked_tokens, token_texts

_LONGEST_CONTEXT, _LONGEST_REPLY = 200, 600  # tokens of one part that are shown on a terminal
_FIRST_PARTS, _LAST_PARTS = 24, 12  # of replies and the context between them
_ELSEWHERE, _CONTEXT, _FOLDED = "underline", "dim", "bold"

Values = npt.NDArray[np.float64]


class Measure(enum.StrEnum):
    """The values by which tokens can be colored."""

    TRAINED = "trained"  # whether the token trains
    LOGPROB = "logprob"  # as the engine returned it
    PROBABILITY = "probability"
    VERSION = "version"  # of the weights that sampled it
    # From a trainer's token records:
    ENTROPY = "entropy"
    ADVANTAGE = "advantage"
    RATIO = "ratio"
    MISMATCH_KL = "mismatch_kl"

    @property
    def column(self) -> str | None:
        """The column of a token record with the values, or None if the sample itself has them."""
        if self in (Measure.ENTROPY, Measure.RATIO, Measure.MISMATCH_KL):
            return self.value
        return "advantages" if self is Measure.ADVANTAGE else None


class Scale(NamedTuple):
    """The limits between a scale's steps, and how a value is compared with them."""

    limits: tuple[float, ...]
    names: tuple[str, ...]  # of the steps, from the least
    size: Callable[[Values], Values]
    signed: bool = False  # steps on both sides of a middle


SCALES = {
    Measure.LOGPROB: Scale(
        (0.05, 0.3, 1, 2.3, 4.6, 7), ("-0.05", "-0.3", "-1", "-2.3", "-4.6", "-7"), lambda values: -values
    ),
    Measure.PROBABILITY: Scale(
        (0.05, 0.25, 0.63, 0.9, 0.99, 0.999), ("95%", "75%", "37%", "10%", "1%", "0.1%"), lambda values: 1 - values
    ),
    Measure.ENTROPY: Scale(
        (0.1, 0.4, 0.8, 1.4, 2.2, 3.2), ("0.1", "0.4", "0.8", "1.4", "2.2", "3.2"), lambda values: values
    ),
    Measure.MISMATCH_KL: Scale(
        (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1), ("1e-6", "1e-4", "1e-3", "0.01", "0.1", "1"), lambda values: values
    ),
    Measure.ADVANTAGE: Scale(
        (1e-9, 0.5, 1.5), ("-1.5", "-0.5", "below 0", "above 0", "0.5", "1.5"), lambda values: values, signed=True
    ),
    Measure.RATIO: Scale((1e-9, 0.1, 0.5), ("0.61", "0.9", "below 1", "above 1", "1.1", "1.65"), np.log, signed=True),
}


class MeasuredTokens(NamedTuple):
    """A value for each token of a sample, and which tokens have one. NaN is a value."""

    by: Measure
    values: Values
    present: npt.NDArray[np.bool_]


def measure_tokens(sample: Sample, by: Measure, record: TokenRecord | None) -> MeasuredTokens:
    """The values of a sample's tokens; a version is given as its index among the sample's versions."""
    if by is Measure.TRAINED:
        return MeasuredTokens(by, sample.trained_mask.astype(np.float64), sample.sampled_mask)
    if by is Measure.VERSION:
        return MeasuredTokens(by, sample.version_index.astype(np.float64), sample.version_index >= 0)
    if by in (Measure.LOGPROB, Measure.PROBABILITY):
        logprobs = sample.logprobs.astype(np.float64)
        return MeasuredTokens(by, logprobs if by is Measure.LOGPROB else np.exp(logprobs), ~np.isnan(logprobs))
    held = None if record is None or by.column is None else record.columns().get(by.column)
    if record is None or held is None:
        raise _missing(by, sample.id, record)
    record.spans_in(sample)  # raises if the record holds other ids
    values, present = np.full(len(sample.ids), np.nan), np.zeros(len(sample.ids), np.bool_)
    values[: len(record)], present[: len(record)] = held, record.trained_mask
    return MeasuredTokens(by, values, present)


def _missing(by: Measure, sample: str, record: TokenRecord | None) -> UsageError:
    held = {} if record is None else record.columns()
    there = [one.value for one in Measure if one.column is None or one.column in held]
    why = (
        f"the run has no token record of sample {sample}; a trainer writes them"
        if record is None
        else f"token record {record.place} of sample {sample} lacks it"
    )
    return UsageError(f"--color-by {by}: {why}; available: {', '.join(there)}")


def steps_of(given: MeasuredTokens) -> list[int]:
    """The step of each value: 0 for none, else from 1; below the middle of a signed scale from -1 down.

    NaN is on the last step.
    """
    scale = SCALES[given.by]
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes = scale.size(given.values)
    steps = np.searchsorted(scale.limits, np.abs(sizes) if scale.signed else sizes, side="right")
    steps = np.where((sizes < 0) & scale.signed, -steps, steps)
    return [int(step) for step in np.where(given.present, steps, 0)]


def plain_values(given: MeasuredTokens, versions: Sequence[tuple[str, str]]) -> list[float | str | None]:
    """Each value, with weight versions by name; None for tokens without a value."""
    pairs = zip(given.values.tolist(), given.present.tolist(), strict=True)
    if given.by is Measure.VERSION:
        return [version_name(*versions[int(value)]) if present else None for value, present in pairs]
    return [value if present else None for value, present in pairs]


def version_name(first: str, last: str) -> str:
    """A weight version, or the first and last one of a range."""
    return first if first == last else f"{first}..{last}"


class _Palette(NamedTuple):
    """Styles set foreground and background, so that they look the same on light and dark terminals."""

    trained: Sequence[str]  # used in turn, to show where a token ends
    masked: Sequence[str]
    heat: Sequence[str]
    below: Sequence[str]
    above: Sequence[str]
    versions: Sequence[str]


def _on(*grounds: int) -> list[str]:
    return [f"color(16) on color({ground})" for ground in grounds]


_MANY = _Palette(
    trained=_on(153, 117),
    masked=_on(222, 215),
    heat=[*_on(229, 222, 215, 208, 202), "color(231) on color(160)"],
    below=_on(223, 215, 208),
    above=_on(195, 117, 75),
    versions=_on(153, 222, 157, 183, 217, 187),
)
_FEW = _Palette(
    trained=["black on cyan"],
    masked=["black on yellow"],
    heat=["underline", *["black on yellow"] * 3, *["bright_white on red"] * 2],
    below=["", "black on yellow", "bright_white on red"],
    above=["", "black on cyan", "bright_white on blue"],
    versions=[f"black on {ground}" for ground in ("cyan", "yellow", "green", "magenta", "white")],
)


class Painter:
    """Writes samples for a color system, or without colors for None."""

    def __init__(self, system: ColorSystem | None, *, full: bool) -> None:
        self._system = system
        self._palette = _FEW if system is ColorSystem.STANDARD else _MANY
        self._full = full
        self._styles: dict[str, Style] = {}
        self._versions: dict[tuple[str, str], int] = {}  # in order of appearance: one color each in all samples

    def legend(self, by: Measure, versions: Sequence[tuple[str, str]]) -> str:
        """The meaning of the colors; empty if the marks show it."""
        if self._system is None:
            return (
                "" if by is Measure.TRAINED else f"«trained» ‹sampled, not trained here› context, each with =its {by}"
            )
        palette = self._palette
        if by is Measure.TRAINED:
            named = [("trained", palette.trained[0]), ("masked", palette.masked[0])]
            named += [("trained in another sample", _ELSEWHERE), ("context", _CONTEXT)]
        elif by is Measure.VERSION:
            named = [(version_name(*one), self._version_style(one)) for one in versions]
        elif SCALES[by].signed:
            steps = (-3, -2, -1, 1, 2, 3)
            named = [(name, self._step_style(by, step)) for name, step in zip(SCALES[by].names, steps, strict=True)]
        else:
            named = [(name, self._step_style(by, at + 1)) for at, name in enumerate(SCALES[by].names)]
        return f"{by}: " + " ".join(self._painted(f" {visible(name)} ", style) for name, style in named if style)

    def tokens(self, sample: Sample, spell: Spell | None, given: MeasuredTokens) -> Iterator[str]:
        """The sample in pieces, colored or marked, with the middle of long parts folded unless `full`."""
        if self._system is None:
            marked = _marked_texts(sample, spell, given)
            for start, stop, folded in self._shown(sample):
                yield visible(" ".join(marked[start:stop]))
                yield self._fold_line(folded) or (" " if start < stop < len(marked) else "")
            return
        texts = token_texts(sample.ids.tolist(), spell)
        styles = self._styles_of(sample, given)
        between = " " if spell is None else ""
        for start, stop, folded in self._shown(sample):
            for at in range(start, stop):
                yield from self._token("" if texts[at] == PART else texts[at], styles[at])
                yield between
            yield self._fold_line(folded)

    def _fold_line(self, folded: str) -> str:
        return "\n" + self._painted(f"… {folded} …", _FOLDED) + "\n" if folded else ""

    def _token(self, text: str, style: str) -> Iterator[str]:
        *lines, rest = text.replace("\t", "⇥   ").split("\n")
        for line in lines:
            yield self._painted(f"{visible(line)}↵", style) + "\n"
        yield self._painted(visible(rest), style)

    def _shown(self, sample: Sample) -> Iterator[tuple[int, int, str]]:
        """Yield the ranges of tokens to show, each with the line for what is folded after it."""
        changes = np.flatnonzero(np.diff(sample.sampled_mask)) + 1
        parts = list(pairwise([0, *changes.tolist(), len(sample.ids)]))
        hidden = [] if self._full else parts[_FIRST_PARTS:-_LAST_PARTS]
        for start, stop in parts:
            if hidden and hidden[0][0] <= start < hidden[-1][1]:
                if start == hidden[0][0]:
                    replies = sum(bool(sample.sampled_mask[first]) for first, _ in hidden)
                    yield start, start, f"{plural(hidden[-1][1] - start, 'token')}, among them {count(replies)} replies"
                continue
            limit = _LONGEST_REPLY if sample.sampled_mask[start] else _LONGEST_CONTEXT
            if self._full or stop - start <= limit:
                yield start, stop, ""
            else:
                yield start, start + limit // 2, plural(stop - start - 2 * (limit // 2), "token")
                yield stop - limit // 2, stop, ""

    def _styles_of(self, sample: Sample, given: MeasuredTokens) -> list[str]:
        plain = np.where(sample.sampled_mask, "", _CONTEXT).tolist()
        if given.by is Measure.VERSION:
            index = sample.version_index.tolist()
            return [plain[at] if one < 0 else self._version_style(sample.versions[one]) for at, one in enumerate(index)]
        if given.by is not Measure.TRAINED:
            return [self._step_style(given.by, step) if step else plain[at] for at, step in enumerate(steps_of(given))]
        styles = [_CONTEXT] * len(sample.ids)
        for span in sample.spans:
            for at in range(span.start, span.stop) if sample.sampled_mask[span.start] else ():
                shades = self._palette.trained if sample.trained_mask[at] else self._palette.masked
                styles[at] = _ELSEWHERE if span.fate is None else shades[at % len(shades)]
        return styles

    def _step_style(self, by: Measure, step: int) -> str:
        if SCALES[by].signed:
            return self._palette.below[-step - 1] if step < 0 else self._palette.above[step - 1]
        return self._palette.heat[step - 1]

    def _version_style(self, version: tuple[str, str]) -> str:
        shades = self._palette.versions
        return shades[self._versions.setdefault(version, len(self._versions)) % len(shades)]

    def _painted(self, text: str, style: str) -> str:
        if style not in self._styles:
            self._styles[style] = Style.parse(style)
        return self._styles[style].render(text, color_system=self._system)


def _marked_texts(sample: Sample, spell: Spell | None, given: MeasuredTokens) -> list[str]:
    """Each token with its marks and, unless the marks show it, its value."""
    marked = marked_tokens(sample, spell)
    if given.by is Measure.TRAINED:
        return marked
    values = [one if isinstance(one, str) else number(one) for one in plain_values(given, sample.versions)]
    return [f"{token}={value}" if value else token for token, value in zip(marked, values, strict=True)]
