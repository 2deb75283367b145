"""Writes a sample's tokens in a terminal's colors, or with marks and values where there are no colors."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from rich.color import ColorSystem
from rich.style import Style

from rolltape.cli.look.measures import SCALES, Measure, MeasuredTokens, steps_of, value_texts, version_name
from rolltape.cli.output.screen import visible
from rolltape.records.sample import Sample
from rolltape.samples.spelling import PART, Spell, marked_tokens, token_texts

_LONGEST_CONTEXT = 400  # tokens
_LONGEST_REPLY = 4_000


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
_ELSEWHERE, _CONTEXT, _FOLDED = "underline", "dim", "bold"


class Painter:
    """Writes samples for a color system, or without colors for None."""

    def __init__(self, system: ColorSystem | None, *, full: bool) -> None:
        self._system = system
        self._palette = _FEW if system is ColorSystem.STANDARD else _MANY
        self._full = full
        self._styles: dict[str, Style] = {}
        self._versions: dict[tuple[str, str], int] = {}  # in order of appearance: one color each in all samples

    def legend(self, by: Measure, versions: Sequence[tuple[str, str]]) -> str:
        """What the colors mean; empty if the marks say it."""
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
        """The sample in pieces: colored, with the middle of long parts folded; or marked."""
        if self._system is None:
            yield _marked_line(sample, spell, given)
            return
        texts = token_texts(sample.ids.tolist(), spell)
        styles = self._styles_of(sample, given)
        between = " " if spell is None else ""
        for start, stop, folded in self._shown(sample):
            for at in range(start, stop):
                yield from self._token("" if texts[at] == PART else texts[at], styles[at])
                yield between
            if folded:
                yield "\n" + self._painted(f"… {folded:,} tokens …", _FOLDED) + "\n"

    def _token(self, text: str, style: str) -> Iterator[str]:
        *lines, rest = text.replace("\t", "⇥   ").split("\n")
        for line in lines:
            yield self._painted(f"{visible(line)}↵", style) + "\n"
        yield self._painted(visible(rest), style)

    def _shown(self, sample: Sample) -> Iterator[tuple[int, int, int]]:
        """Ranges of tokens to show, and how many are folded after each."""
        changes = np.flatnonzero(np.diff(sample.sampled_mask)) + 1
        for start, stop in pairwise([0, *changes.tolist(), len(sample.ids)]):
            limit = _LONGEST_REPLY if sample.sampled_mask[start:stop].any() else _LONGEST_CONTEXT
            if self._full or stop - start <= limit:
                yield start, stop, 0
            else:
                yield start, start + limit // 2, stop - start - 2 * (limit // 2)
                yield stop - limit // 2, stop, 0

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


def _marked_line(sample: Sample, spell: Spell | None, given: MeasuredTokens) -> str:
    marked = marked_tokens(sample, spell)
    if given.by is not Measure.TRAINED:
        values = value_texts(given, sample.versions)
        marked = [f"{token}={value}" if value else token for token, value in zip(marked, values, strict=True)]
    return visible(" ".join(marked))
