"""Runs, rollouts and trees in a notebook: a run's totals; a rollout's facts, trees, transcript or samples."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from rolltape.notebook.html import clipped, details, div, framed, gap, span, table, text
from rolltape.notebook.sample import sample_parts
from rolltape.records.fork import Fork
from rolltape.records.rollout import Rollout, Session
from rolltape.records.wording import SHORT_ID, count, number, plural, quoted, reward_facts, token_fact
from rolltape.samples.facts import fact_lines, title
from rolltape.samples.linearize import Linearized, linearize
from rolltape.samples.spelling import Spell, spell_at, token_texts
from rolltape.tape.run import Run
from rolltape.traces import trace_of
from rolltape.traces.transcript import Passage, build_transcript, session_transcript
from rolltape.tree import Tree, forks_of, tree_of
from rolltape.tree.drawing import Drawn, drawn_turns, headline, turn_lines

_RUN_ROWS = 20
_FIRST, _LAST = 30, 20  # turns of a transcript
_PARTS = 24  # of one turn: messages, their thinking, their calls
_BEGINNING, _END = 1_500, 500  # characters of a text
_SESSIONS = 8
_SAMPLES, _SAMPLE_TOKENS = 4, 400
_TREE_FIRST, _TREE_LAST, _TREE_FORKS = 120, 60, 120  # turns of a tree
_TREE_MESSAGES = 2  # of a turn
_INDENT, _DEEPEST = 18, 14  # pixels per column of a tree; further columns are drawn at the last one


def run_html(run: Run) -> str:
    """A run's name, its totals and its latest rollouts."""
    rows = run.index()
    statuses = Counter(row.outcome.status.value for row in rows)
    facts = [plural(len(rows), "rollout"), *(f"{many:,} {status}" for status, many in statuses.items())]
    facts += reward_facts(row.outcome.reward for row in rows)
    facts.append(token_fact(row.known_tokens for row in rows))
    latest = sorted(rows, key=lambda row: row.head.started_at_ns)[-_RUN_ROWS:]
    cells = [
        [
            row.id[:SHORT_ID],
            str(row.head.step),
            row.head.task_id or "",
            str(row.head.attempt),
            row.outcome.status.value,
            number(row.outcome.reward),
            count(row.turns),
            "" if row.known_tokens is None else count(row.known_tokens),
        ]
        for row in reversed(latest)
    ]
    header = ["rollout", "step", "task", "attempt", "status", "reward", "turns", "sampled"]
    earlier = len(rows) - len(latest)
    return framed(
        div("title", text(f"run {run.name}")),
        div("quiet", text(run.location)),
        div("facts", text(", ".join(facts))),
        table(header, cells, left=("rollout", "task", "status")) if cells else "",
        gap(f"{plural(earlier, 'earlier rollout')} left out") if earlier else "",
    )


def rollout_html(rollout: Rollout) -> str:
    """A rollout's facts, trees and transcript."""
    made = linearize(rollout, as_if_finished=True)
    trees = [_tree(one.session, one.tree, one.forks) for one in made.sessions[:_SESSIONS]]
    if len(made.sessions) > _SESSIONS:
        trees.append(gap(f"{plural(len(made.sessions) - _SESSIONS, 'session')} left out"))
    return framed(_facts(made), *trees, _transcript(list(build_transcript(rollout, trace_of(rollout)))))


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
    parts = [_part(kind, content) for kind, content in passage.parts[-_PARTS:]]
    return div("block", f"{span('title', name)} {span('quiet', facts)}{cause}", left_out, *parts)


def _part(kind: str, content: str) -> str:
    body = text(content)
    if len(content) > _BEGINNING + _END:
        left_out = gap(f"{len(content) - _BEGINNING - _END:,} characters left out")
        body = text(content[:_BEGINNING]) + left_out + text(content[-_END:])
    quiet = " rt-quiet" if kind == "thinks" else ""
    return div("part", span("quiet", kind), div(f"text{quiet}", body))


def tree_html(tree: Tree) -> str:
    """A tree alone."""
    forks = forks_of(tree)
    return framed(
        div("title", f"{plural(len(tree.turns), 'turn')}, {plural(len(forks), 'fork')}"), tree_parts(tree, forks)
    )


def tree_parts(tree: Tree, forks: Sequence[Fork]) -> str:
    """The turns from top to bottom. If there are many, only the first, the last, and forks."""
    at = {fork.turn: fork for fork in forks}
    spell = spell_at(tree.tokenizers)
    return div("box", *_rows(list(drawn_turns(tree)), at, spell))


def _rows(drawn: Sequence[Drawn], forks: dict[str, Fork], spell: Spell | None) -> Iterator[str]:
    hidden = 0
    forked = 0
    for position, one in enumerate(drawn):
        fork = forks.get(one.placed.turn.id)
        forked += fork is not None
        if (
            position < _TREE_FIRST
            or position >= len(drawn) - _TREE_LAST
            or (fork is not None and forked <= _TREE_FORKS)
        ):
            if hidden:
                yield div("left-out", gap(f"{plural(hidden, 'turn')} left out"))
            hidden = 0
            yield _row(one, fork, spell)
        else:
            hidden += 1


def _row(drawn: Drawn, fork: Fork | None, spell: Spell | None) -> str:
    placed = drawn.placed
    name, _, facts = headline(placed, None).partition("  ")
    parts = [span("title", f"turn {name}"), " ", span("quiet", facts)]
    if fork is not None:
        parts += [" ", span("cause", fork.cause.value), div("quiet rt-mono", text(_departure(fork, spell)))]
    parts += [div("mono", text(line)) for line in turn_lines(placed, _TREE_MESSAGES)]
    kind = "turn" if drawn.column == 0 else "turn rt-off"
    left = min(drawn.column, _DEEPEST) * _INDENT
    passing = f"padding-left:{left}px;background-size:{left}px 100%"
    return div("row" if placed.parent else "row rt-root", div(kind, *parts), style=passing)


def _departure(fork: Fork, spell: Spell | None) -> str:
    where = "" if fork.message_index is None else f" at message {fork.message_index}"
    difference = fork.tokens if fork.text is None else fork.text
    return (
        f"departs from turn {fork.departs_from.rpartition('.')[2]}{where}: "
        f"{_side(difference.before, spell)} → {_side(difference.after, spell)}"
    )


def _side(excerpt: str | tuple[int, ...], spell: Spell | None) -> str:
    if isinstance(excerpt, str):
        return quoted(excerpt, 40)
    return quoted(("" if spell else " ").join(token_texts(excerpt[:12], spell)), 40) if excerpt else "(end)"
