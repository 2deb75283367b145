"""`rolltape tree`: the turns of a rollout as trees, and why they fork."""

from typing import TYPE_CHECKING, Any

from rolltape.cli.options import JsonOption, RolloutArgument, RunArgument, TokenizerOption, TryOption

if TYPE_CHECKING:
    from rolltape.cli.tokenizer import Texts
    from rolltape.records.rollout import Rollout, Session


def tree(
    run: RunArgument,
    rollout: RolloutArgument = None,
    try_index: TryOption = None,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> int:
    """Draw a rollout's turns, and the cause of every fork."""
    from rolltape.cli.runs import Chosen, ended, opened
    from rolltape.cli.tokenizer import Texts

    tape = opened(run)
    texts = Texts(tokenizer, run)
    chosen = Chosen(tape, rollout, try_index=try_index, counted_only=True)
    meant = chosen.only()
    with chosen.named_in_errors():
        if as_json:
            _print_records(meant)
        else:
            _draw(meant, texts)
    return ended(tape)


def _print_records(rollout: "Rollout") -> None:
    from rolltape.cli.screen import print_json
    from rolltape.tree import forks_of, tree_of

    for session in rollout.sessions:
        grown = tree_of(session)
        print_json(_record(rollout, session, grown, forks_of(grown)))


def _draw(rollout: "Rollout", texts: "Texts") -> None:
    from rolltape.cli.drawing import drawn_tree
    from rolltape.cli.screen import plural, print_line
    from rolltape.tree import forks_of, tree_of

    print_line(title(rollout), style="bold")
    for session in rollout.sessions:
        grown = tree_of(session)
        forks = forks_of(grown)
        sampled = sum(len(turn.sampled_ids) for turn in session.turns)
        print_line(
            f"session {session.ordinal}: {plural(len(session.turns), 'turn')}, {plural(sampled, 'sampled token')}, "
            f"{plural(len(forks), 'fork')}"
        )
        for line, style in drawn_tree(grown, forks, texts.of(session)):
            print_line(line, style=style)


def title(rollout: "Rollout") -> str:
    """A rollout in a line: what it was, and how it ended."""
    from rolltape.cli.screen import SHORT_ID, number

    head, outcome = rollout.head, rollout.outcome
    parts = [f"rollout {head.id[:SHORT_ID]}", f"step {head.step}"]
    if head.task_id is not None:
        parts.append(f"task {head.task_id}")
    parts.append(f"attempt {head.attempt}" + (f" (try {head.try_index})" if head.try_index else ""))
    parts.append(outcome.status.value + (f" ({outcome.reason})" if outcome.reason else ""))
    if outcome.reward is not None:
        parts.append(f"reward {number(outcome.reward)}")
    return ", ".join(parts)


def _record(rollout: "Rollout", session: "Session", grown: Any, forks: Any) -> dict[str, object]:
    import msgspec

    from rolltape.cli.drawing import new_messages

    return {
        "rollout": rollout.id,
        "try_index": rollout.head.try_index,
        "session": session.id,
        "turns": [
            {
                "turn": placed.turn.id,
                "parent": None if placed.parent is None else placed.parent.turn.id,
                "prompt_tokens": len(placed.turn.prompt_tokens),
                "sampled_tokens": len(placed.turn.sampled_ids),
                "finish": placed.turn.facts.finish,
                "delivery": placed.turn.facts.delivery,
                "auxiliary": placed.turn.facts.auxiliary,
                "flags": placed.turn.facts.flags,
                "new_messages": [message.to_dict() for message in new_messages(placed)],
                "reply": None if placed.turn.reply is None else placed.turn.reply.to_dict(),
            }
            for placed in grown.turns
        ],
        "forks": [msgspec.to_builtins(fork) for fork in forks],
    }
