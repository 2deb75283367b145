"""`rolltape tag`: add, remove, and list tags of rollouts, turns, and tokens."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import rolltape
from rolltape.cli.judge.places import PlaceOptions, place_flags, place_text
from rolltape.cli.options import JsonOption, NamedRollout, OneRollout, RunArgument
from rolltape.cli.parameters import argument, option
from rolltape.cli.runs import OpenedRun, SelectedRollouts, open_snapshot, report_problems
from rolltape.cli.screen import SHORT_ID, count, plural, print_json, print_line, print_table
from rolltape.errors import UsageError
from rolltape.records.rollout import TokenRange
from rolltape.tape.run import Run


def tag(
    run: RunArgument,
    rollout: NamedRollout = None,
    tags: Annotated[list[str] | None, argument("TAG...", "Tags to add; `bookmark` is the star in the viewer.")] = None,
    *,
    remove: Annotated[bool, option("--remove", "Remove the tags.")] = False,
    place: PlaceOptions,
    as_json: JsonOption = False,
) -> int:
    """Tag rollouts, turns, or tokens, or list the tags of a run.

    Without ROLLOUT, list all tags of the run; without TAG, those of the rollout. A rollout may have any number of tags.
    The tape keeps the history of tags that were removed.
    """
    if not tags and (remove or place.given()):
        raise UsageError(f"{(['--remove'] if remove else place.given())[0]}: name a ROLLOUT and a TAG")
    with open_snapshot(run) as tape:
        if rollout is None:
            _list_all(tape, as_json=as_json)
        else:
            selected = SelectedRollouts(tape, OneRollout(rollout, place.try_index))
            if tags:
                found, turn, tokens = place.find(selected)
                if remove:
                    _check_tags_are_at(tape.run, found.id, tags, turn, tokens, place.try_index)
                with rolltape.open(tape.run.location) as writer:
                    change = writer.remove_tags if remove else writer.add_tags
                    change(found.id, *tags, turn=turn, tokens=tokens, by=place.author(), try_index=place.try_index)
    if rollout is not None:
        _list_one(rollout, run, place.try_index, as_json=as_json)
    return report_problems(tape)


def _check_tags_are_at(
    run: Run, rollout: str, tags: Sequence[str], turn: str | None, tokens: TokenRange | None, try_index: int | None
) -> None:
    """Refuse to remove a tag from a place that does not have it; the error says where the rollout has it."""
    tries = run.find(rollout, try_index).tries
    held = [(number, one) for number in tries for one in run.annotations(rollout, number).tags]
    for name in map(str.strip, tags):
        places = {(one.turn, one.tokens): number for number, one in held if one.name == name}
        if not places:
            raise UsageError(f"TAG {name}: rollout {rollout} has no such tag; `rolltape tag RUN ROLLOUT` lists them")
        if (turn, tokens) not in places:
            asked = "the rollout itself" if turn is None else place_text(turn, tokens)
            flags = " or ".join(place_flags(*at, number if len(tries) > 1 else None) for at, number in places.items())
            raise UsageError(f"TAG {name}: not on {asked}; rollout {rollout} has it elsewhere: give {flags}")


def _list_all(tape: OpenedRun, *, as_json: bool) -> None:
    whole = Counter(name for row in tape.rows for name in dict.fromkeys(row.outcome.tags))
    inner = Counter(name for row in tape.rows for name in row.inner_tags)
    names = sorted({*whole, *inner})
    if as_json:
        for name in names:
            print_json({"tag": name, "rollouts": whole[name], "within_rollouts": inner[name]})
        return
    if names:
        print_table(
            ["tag", "rollouts", "by turn or token"],
            [[name, count(whole[name]), count(inner[name])] for name in names],
            left=["tag"],
            flexible=["tag"],
        )
    print_line(plural(len(names), "tag"))


def _list_one(rollout: str, run: str, try_index: int | None, *, as_json: bool) -> None:
    with open_snapshot(run) as tape:
        row = SelectedRollouts(tape, OneRollout(rollout, try_index)).rows[0]
        tags = tape.run.annotations(*row.key).tags
    if as_json:
        for one in tags:
            place = {"turn": one.turn, "tokens": one.tokens}
            print_json({"rollout": row.id, "try_index": row.try_index, "tag": one.name, **place, "by": one.by})
        return
    if tags:
        print_table(
            ["rollout", "turn", "tag", "by"],
            [[row.id[:SHORT_ID], place_text(one.turn, one.tokens), one.name, one.by or ""] for one in tags],
            left=["rollout", "turn", "tag", "by"],
            flexible=["tag", "by"],
        )
    print_line(plural(len(tags), "tag"))
