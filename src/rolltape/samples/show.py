"""A sample as one readable line."""

from collections.abc import Callable

from rolltape.records.sample import Sample
from rolltape.samples.spelling import token_texts

_VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})


def show(sample: Sample, text: Callable[[int], str | bytes] | None = None) -> str:
    """Tokens in order, spaces visible: «trained», ‹sampled but not trained here›, and the rest plain.

    `text` gives an id's text, or its bytes; without it the ids themselves are shown.
    """
    return " ".join(marked_tokens(sample, text))


def marked_tokens(sample: Sample, text: Callable[[int], str | bytes] | None = None) -> list[str]:
    """Each token of a sample as `show` writes it."""
    texts = token_texts(sample.ids.tolist(), text)
    marks = zip(texts, sample.trained_mask.tolist(), sample.sampled_mask.tolist(), strict=True)
    return [_marked(one.translate(_VISIBLE), trained, sampled) for one, trained, sampled in marks]


def _marked(text: str, trained: bool, sampled: bool) -> str:
    return f"«{text}»" if trained else f"‹{text}›" if sampled else text
