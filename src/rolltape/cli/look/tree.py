"""`rolltape tree`: the turns of a rollout as trees, and why they fork."""

from typing import TYPE_CHECKING, Any

from rolltape.cli.options import JsonOption, RolloutArgument, RunArgument, TokenizerOption, TryOption

if TYPE_CHECKING:
    from rolltape.records.rollout import Rollout, Session
    from rolltape.samples.spelling import Spellings


def tree(
    run: RunArgument,
    rollout: RolloutArgument = None,
    try_index: TryOption = None,
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> int:
    """Draw a rollout's turns, and the cause of every fork."""
    from rolltape.cli.output.screen import print_line
    from rolltape.cli.output.spelling import chosen_spellings
    from rolltape.cli.runs import Chosen, ended, opened
    from rolltape.samples.facts import title

    tape = opened(run)
    spellings = chosen_spellings(tokenizer, run)
    chosen = Chosen(tape, rollout, try_index=try_index, counted_only=True)
    meant = chosen.only()
    with chosen.named_in_errors():
        if as_json:
            _print_records(meant)
        else:
            print_line(title(meant), style="bold")
            draw_trees(meant, spellings)
    return ended(tape)


def _print_records(rollout: "Rollout") -> None:
    from rolltape.cli.output.screen import print_json
    from rolltape.tree import forks_of, tree_of

    for session in rollout.sessions:
        grown = tree_of(session)
        print_json(_record(rollout, session, grown, forks_of(grown)))


def draw_trees(rollout: "Rollout", spellings: "Spellings") -> None:
    """Print the tree of each session."""
    from rolltape.cli.look.drawing import drawn_tree
    from rolltape.cli.output.screen import plural, print_line
    from rolltape.tree import forks_of, tree_of

    for session in rollout.sessions:
        grown = tree_of(session)
        forks = forks_of(grown)
        sampled = sum(len(turn.sampled_ids) for turn in session.turns)
        print_line(
            f"session {session.ordinal}: {plural(len(session.turns), 'turn')}, {plural(sampled, 'sampled token')}, "
            f"{plural(len(forks), 'fork')}"
        )
        for line, style in drawn_tree(grown, forks, spellings.of(session)):
            print_line(line, style=style)


def _record(rollout: "Rollout", session: "Session", grown: Any, forks: Any) -> dict[str, object]:
    import msgspec

    from rolltape.tree.lanes import new_messages

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
