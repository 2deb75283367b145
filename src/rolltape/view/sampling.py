"""The samples of a linearized rollout without their arrays, as the page lists them."""

from typing import Any

import msgspec

from rolltape.samples import Linearized


def samples_in_brief(made: Linearized, advantage: float | None) -> list[dict[str, Any]]:
    """Each sample without its tokens; `advantage` is the rollout's."""
    briefs = []
    for outline in made.outlines:
        fields = msgspec.structs.asdict(outline)
        briefs.append({**fields, "trained": fields.pop("trained_tokens"), "advantage": advantage})
    return briefs
