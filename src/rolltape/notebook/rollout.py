"""A rollout in a notebook: its facts, the trees of its sessions, its transcript; or its samples."""

from collections.abc import Sequence
from itertools import islice

from rolltape.notebook.html import clipped, details, div, framed, gap, span, text
from rolltape.notebook.sample import sample_parts
from rolltape.notebook.tree import tree_parts
from rolltape.records.fork import Fork
from rolltape.records.rollout import Rollout, Session, Status
from rolltape.records.wording import plural
from rolltape.samples.facts import fact_lines, title
from rolltape.samples.linearize import Linearized, linearize
from rolltape.traces import trace_of
from rolltape.traces.transcript import Passage, session_transcript, transcript_of
from rolltape.tree import Tree, forks_of, tree_of

_FIRST, _LAST = 30, 20  # turns of a transcript
_PARTS = 24  # of one turn: messages, their thinking, their calls
_BEGINNING, _END = 1_500, 500  # characters of a text
_SESSIONS = 8
_SAMPLES, _SAMPLE_TOKENS = 4, 400


def rollout_html(rollout: Rollout) -> str:
    """How it went, and what was said."""
    made = linearize(rollout, as_if_finished=rollout.status is Status.RUNNING)
    trees = [_tree(one.session, one.tree, one.forks) for one in made.sessions[:_SESSIONS]]
    if len(made.sessions) > _SESSIONS:
        trees.append(gap(f"{plural(len(made.sessions) - _SESSIONS, 'session')} left out"))
    return framed(_facts(made), *trees, _transcript(list(transcript_of(rollout, trace_of(rollout)))))


def session_html(session: Session) -> str:
    """A session's tree and transcript."""
    tree = tree_of(session)
    return framed(_tree(session, tree, forks_of(tree)), _transcript(list(session_transcript(session))))


def linearized_html(made: Linearized) -> str:
    """A rollout's facts under a policy, and its first samples."""
    parts = [sample_parts(sample, _SAMPLE_TOKENS) for sample in islice(made.samples(), _SAMPLES)]
    if len(made) > _SAMPLES:
        parts.append(gap(f"{plural(len(made) - _SAMPLES, 'sample')} left out"))
    return framed(_facts(made), *parts)


def _facts(made: Linearized) -> str:
    facts = "".join(div("quiet", clipped(line)) for line in fact_lines(made))
    return div("title", clipped(title(made.rollout))) + facts


def _tree(session: Session, tree: Tree, forks: Sequence[Fork]) -> str:
    counts = f"{plural(len(tree.turns), 'turn')}, {plural(len(forks), 'fork')}"
    return details(f"session {session.ordinal}: {counts}", tree_parts(tree, forks))


def _transcript(passages: Sequence[Passage]) -> str:
    hidden = len(passages) - _FIRST - _LAST
    if hidden <= 0:
        blocks = [_block(passage) for passage in passages]
    else:
        left_out = div("block", gap(f"{hidden:,} turns left out"))
        blocks = [*map(_block, passages[:_FIRST]), left_out, *map(_block, passages[-_LAST:])]
    return details("transcript", div("box", *blocks))


def _block(passage: Passage) -> str:
    name, _, facts = passage.title.partition("  ")
    cause = "" if passage.cause is None else f" {span('cause', passage.cause)}"
    hidden = len(passage.parts) - _PARTS
    left_out = div("part", "<span></span>", gap(f"{hidden:,} parts left out")) if hidden > 0 else ""
    parts = [_part(kind, said) for kind, said in passage.parts[-_PARTS:]]
    return div("block", f"{span('title', name)} {span('quiet', facts)}{cause}", left_out, *parts)


def _part(kind: str, said: str) -> str:
    body = text(said)
    if len(said) > _BEGINNING + _END:
        left_out = gap(f"{len(said) - _BEGINNING - _END:,} characters left out")
        body = text(said[:_BEGINNING]) + left_out + text(said[-_END:])
    quiet = " rt-quiet" if kind == "thinks" else ""
    return div("part", span("quiet", kind), div(f"text{quiet}", body))
