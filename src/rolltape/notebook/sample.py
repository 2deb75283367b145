"""A sample in a notebook: its tokens, colored by fate, with the other facts in a title on each token."""

from collections.abc import Iterator, Sequence

import numpy as np

from rolltape.notebook.html import div, framed, gap, span
from rolltape.records.ids import short_turn
from rolltape.records.sample import Origin, Sample, Span
from rolltape.records.wording import number, plural
from rolltape.samples.spelling import PART, spell_at, token_texts

_SHOWN = 1_600  # tokens at the beginning and at the end together
_WORST = 12  # least likely trained tokens in between, shown with those around them
_AROUND = 12


def sample_html(sample: Sample) -> str:
    return framed(sample_parts(sample))


def sample_parts(sample: Sample, shown: int = _SHOWN) -> str:
    """A sample's title, legend and tokens. A long one shows the beginning, the end and the least likely tokens."""
    facts = [
        f"sample {sample.index} of {sample.siblings}",
        f"{plural(len(sample.ids), 'token')}, {sample.trained_tokens:,} trained",
    ]
    facts += [] if sample.reward is None else [f"reward {number(sample.reward)}"]
    facts += [] if sample.advantage is None else [f"advantage {number(sample.advantage)}"]
    facts += [f"policy {sample.policy.rpartition('-')[0] or sample.policy}", f"step {sample.step}"]
    keys = [("trained", "trained"), ("masked", "masked"), ("elsewhere", "trained in another sample")]
    legend = "".join(span(f"{kind} rt-key", name) for kind, name in keys) + '<span class="rt-quiet">context</span>'
    tokens = div("box", div("text", *_tokens(sample, shown)))
    return div("title", span("title", " · ".join(facts), title=sample.id)) + div("legend", legend) + tokens


def _tokens(sample: Sample, shown: int) -> Iterator[str]:
    spell = spell_at(sample.tokenizers)
    at = 0
    for start, stop in _windows(sample, shown):
        if start > at:
            yield gap(f"{start - at:,} tokens left out")
        texts = token_texts(sample.ids[start:stop].tolist(), spell)
        yield from _window(sample, start, texts, " " if spell is None else "")
        at = stop


def _windows(sample: Sample, shown: int) -> list[tuple[int, int]]:
    """Which tokens are shown: all, or the beginning, the end, and those around the least likely ones in between."""
    length, end = len(sample.ids), shown // 2
    if length <= shown:
        return [(0, length)]
    between = np.flatnonzero(sample.trained_mask[end : length - end]) + end
    worst = between[np.argsort(sample.logprobs[between], kind="stable")[:_WORST]]
    wanted = [(0, end), *((int(at) - _AROUND, int(at) + _AROUND + 1) for at in np.sort(worst)), (length - end, length)]
    windows: list[tuple[int, int]] = []
    for start, stop in wanted:
        if windows and start <= windows[-1][1]:
            windows[-1] = (windows[-1][0], max(stop, windows[-1][1]))
        else:
            windows.append((start, stop))
    return windows


def _window(sample: Sample, start: int, texts: Sequence[str], between: str) -> Iterator[str]:
    """A range of tokens. Each sampled token has its own span; a prompt's tokens share one."""
    stop = start + len(texts)
    for part in sample.spans:
        first, last = max(part.start, start), min(part.stop, stop)
        if first >= last:
            continue
        own = [_shown(one) for one in texts[first - start : last - start]]
        if part.origin is Origin.PROMPT:
            yield span(
                "quiet",
                between.join(own) + between,
                title=f"prompt of turn {short_turn(part.turn)}, tokens {first}-{last}",
            )
            continue
        kind = "elsewhere" if part.fate is None else "trained" if part.fate == "trained" else "masked"
        for at, one in enumerate(own, first):
            yield span(kind, one, title=_about(sample, part, at)) + between


def _about(sample: Sample, part: Span, at: int) -> str:
    """The title of a sampled token: id, logprob, weights, turn and fate."""
    logprob, version = float(sample.logprobs[at]), int(sample.version_index[at])
    first, last = sample.versions[version] if version >= 0 else ("unknown", "unknown")
    facts = [
        f"token {at}, id {sample.ids[at]}",
        "no logprob" if np.isnan(logprob) else f"logprob {logprob:.4g}, probability {np.exp(logprob):.4g}",
        f"weights {first if first == last else f'{first}..{last}'}",
        f"turn {short_turn(part.turn)}",
        "trained in another sample" if part.fate is None else str(part.fate),
    ]
    return "\n".join(facts)


def _shown(one: str) -> str:
    """A token's text with line breaks marked, or "" if the token is only part of a character."""
    return "" if one == PART else one.replace("\n", "↵\n")
