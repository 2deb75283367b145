"""`rolltape note`: write, change, remove, and list notes on rollouts, turns, and tokens."""

from datetime import UTC, datetime
from typing import Annotated

import rolltape
from rolltape.cli.judge.places import PlaceOptions, place_text
from rolltape.cli.options import JsonOption, NamedRollout, OneRollout, RunArgument
from rolltape.cli.parameters import argument, option
from rolltape.cli.runs import OpenedRun, SelectedRollouts, open_snapshot, report_problems
from rolltape.cli.screen import SHORT_ID, plural, print_json, print_line, print_table
from rolltape.errors import UsageError
from rolltape.records.rollout import Note
from rolltape.tape.stored import Key


def note(
    run: RunArgument,
    rollout: NamedRollout = None,
    text: Annotated[str | None, argument("TEXT", "Text of the note.")] = None,
    *,
    edit: Annotated[str | None, option("--edit NOTE", "Replace the text of this note.")] = None,
    remove: Annotated[str | None, option("--remove NOTE", "Remove this note.")] = None,
    place: PlaceOptions,
    as_json: JsonOption = False,
) -> int:
    """Write a note on a rollout, turn, or token, or list notes.

    Without ROLLOUT, list all notes of the run; without TEXT, those of the rollout. The tape
    keeps the history of notes that were changed or removed.
    """
    _check(rollout, text, edit, remove, place)
    with open_snapshot(run) as tape:
        if rollout is not None and (text is not None or remove is not None):
            selected = SelectedRollouts(tape, OneRollout(rollout, place.try_index))
            by = place.author()
            with rolltape.open(tape.run.location) as writer:
                if remove is not None:
                    writer.remove_note(rollout, remove, by=by)
                elif edit is not None:
                    writer.edit_note(rollout, edit, str(text), by=by)
                else:
                    found, turn, tokens = place.find(selected)
                    try_index = found.head.try_index
                    writer.add_note(found.id, str(text), turn=turn, tokens=tokens, by=by, try_index=try_index)
    with open_snapshot(run) as tape:
        _print(_notes(tape, rollout, place.try_index), as_json=as_json)
    return report_problems(tape)


def _check(rollout: str | None, text: str | None, edit: str | None, remove: str | None, place: PlaceOptions) -> None:
    if edit is not None and remove is not None:
        raise UsageError("--edit and --remove: give only one of them")
    if edit is not None and text is None:
        raise UsageError(f"--edit {edit}: give ROLLOUT and TEXT as well")
    if remove is not None and (rollout is None or text is not None):
        raise UsageError(f"--remove {remove}: give ROLLOUT and no TEXT")
    if text is None and remove is None and place.given():
        raise UsageError(f"{place.given()[0]}: name a ROLLOUT and give TEXT")


def _notes(tape: OpenedRun, rollout: str | None, try_index: int | None) -> list[tuple[Key, Note]]:
    """The notes of a run or of one rollout, in the order in which they were written."""
    if rollout is None:
        held = {key: one.notes for key, one in tape.run.annotations_by_hand().items()}
    else:
        row = SelectedRollouts(tape, OneRollout(rollout, try_index)).rows[0]
        held = {row.key: tape.run.annotations(*row.key).notes}
    return sorted(((key, note) for key, notes in held.items() for note in notes), key=lambda one: one[1].at_ns)


def _print(notes: list[tuple[Key, Note]], *, as_json: bool) -> None:
    if as_json:
        for (rollout, try_index), one in notes:
            fields = {name: getattr(one, name) for name in Note.__struct_fields__ if name != "id"}
            print_json({"note": one.id, "rollout": rollout, "try_index": try_index, **fields})
        return
    if notes:
        print_table(
            ["note", "rollout", "turn", "by", "day", "text"],
            [
                [
                    one.id,
                    rollout[:SHORT_ID],
                    place_text(one.turn, one.tokens),
                    one.by or "",
                    f"{datetime.fromtimestamp(one.at_ns / 1e9, UTC):%Y-%m-%d}",
                    one.text,
                ]
                for (rollout, _), one in notes
            ],
            left=["note", "rollout", "turn", "by", "day", "text"],
            flexible=["text", "by"],
            spare=["day"],
        )
    print_line(plural(len(notes), "note"))
