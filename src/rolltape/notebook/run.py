"""A run in a notebook: how many rollouts, how they went, and the latest of them."""

from collections import Counter

from rolltape.notebook.html import div, framed, gap, table, text
from rolltape.records.wording import SHORT_ID, count, number, plural
from rolltape.tape.run import Run

_SHOWN = 20


def run_html(run: Run) -> str:
    """A run's name, its totals and its latest rollouts."""
    rows = run.index()
    statuses = Counter(row.outcome.status.value for row in rows)
    rewards = [row.outcome.reward for row in rows if row.outcome.reward is not None]
    facts = [plural(len(rows), "rollout"), *(f"{many:,} {status}" for status, many in statuses.items())]
    facts += [f"mean reward {number(sum(rewards) / len(rewards))}"] if rewards else []
    facts.append(plural(sum(row.sampled_tokens for row in rows), "sampled token"))
    latest = sorted(rows, key=lambda row: row.head.started_at_ns)[-_SHOWN:]
    cells = [
        [
            row.id[:SHORT_ID],
            str(row.head.step),
            row.head.task_id or "",
            str(row.head.attempt),
            row.outcome.status.value,
            number(row.outcome.reward),
            count(row.turns),
            count(row.sampled_tokens),
        ]
        for row in reversed(latest)
    ]
    header = ["rollout", "step", "task", "attempt", "status", "reward", "turns", "sampled"]
    earlier = len(rows) - len(latest)
    return framed(
        div("title", text(f"run {run.name}")),
        div("quiet", text(run.location)),
        div("facts", text(", ".join(facts))),
        table(header, cells) if cells else "",
        gap(f"{plural(earlier, 'earlier rollout')} left out") if earlier else "",
    )
