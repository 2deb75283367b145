"""A rollout's transcript in lines."""

from collections.abc import Iterator

from rolltape.cli.look.layout import Labelled
from rolltape.records.rollout import Rollout
from rolltape.traces import trace_of
from rolltape.traces.transcript import NOT_RECORDED, transcript_of

_STYLES = {"thinks": "dim", "error": "yellow", NOT_RECORDED: "yellow"}


def transcript_lines(rollout: Rollout, labelled: Labelled) -> Iterator[tuple[str, str]]:
    """Each line with its style."""
    for passage in transcript_of(rollout, trace_of(rollout)):
        if passage.cause is None:
            yield passage.title, "bold"
        else:
            yield f"{passage.title}  [{passage.cause}]", "bold yellow"
        for kind, text in passage.parts:
            yield from labelled(kind, text, _STYLES.get(kind, ""))
