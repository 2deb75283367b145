"""A sample as one readable line."""

from collections.abc import Callable

from rolltape.records.sample import Sample

_VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"})


def show(sample: Sample, text: Callable[[int], str] | None = None) -> str:
    """Tokens in order, spaces visible: «trained», ‹sampled but not trained here›, and the rest plain.

    `text` gives an id's text; without it the ids themselves are shown.
    """
    tokens = []
    for token, trained, sampled in zip(
        sample.ids.tolist(), sample.trained_mask.tolist(), sample.sampled_mask.tolist(), strict=True
    ):
        spelled = str(token) if text is None else text(token).translate(_VISIBLE)
        tokens.append(f"«{spelled}»" if trained else f"‹{spelled}›" if sampled else spelled)
    return " ".join(tokens)
