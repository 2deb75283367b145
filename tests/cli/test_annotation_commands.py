"""`rolltape tag` and `rolltape note`: write, list, change and take back; `ls` filters on both."""

import json
from pathlib import Path

import rolltape
from commands import Cli
from rolltape.records.rollout import Rollout
from taped import first_turn


def test_tags_and_notes_are_written_listed_filtered_and_taken_back(cli: Cli, tmp_path: Path) -> None:
    place = tmp_path / "exp"
    with rolltape.open(place) as tape:
        ids = []
        for attempt in range(3):
            with tape.rollout(task_id="t", attempt=attempt) as rollout:
                turn = first_turn(rollout.session())
                rollout.finish(reward=1.0)
            ids.append(rollout.id)
    run, (first, second, third) = str(place), ids

    def read(rollout: str) -> Rollout:
        return rolltape.read(place).rollout(rollout)

    assert "bookmark" in cli("tag", run, first[:8], "hack", "bookmark", "--by", "ada").out
    assert cli("tag", run, second, "odd", "--turn", "0.0", "--tokens", "1:3", "--by", "bob").code == 0
    (tag,) = read(second).annotations.tags
    assert (tag.name, tag.turn, tag.tokens, tag.by) == ("odd", f"{second}.0.0.0", (1, 3), "bob")
    listed = cli("tag", run).out
    assert [line.split() for line in listed.splitlines()[1:-1]] == [
        ["bookmark", "1", "0"],
        ["hack", "1", "0"],
        ["odd", "0", "1"],
    ]
    out = cli("note", run, third, "it deletes\nthe test", "--turn", "0.0", "--by", "ada").out
    assert "1 note" in out
    (note,) = read(third).annotations.notes
    assert (note.text, note.turn, note.by) == ("it deletes\nthe test", turn.id, "ada")
    assert cli("note", run, third, "it skips it", "--edit", note.id, "--by", "bob").code == 0
    (line,) = cli("note", run, "--json").out.splitlines()
    told = json.loads(line)
    assert (told["text"], told["by"], told["edited_by"]) == ("it skips it", "ada", "bob")

    def chosen(*flags: str) -> list[str]:
        return [json.loads(one)["rollout"] for one in cli("ls", run, "--json", *flags).out.splitlines()]

    assert chosen("--tag", "hack") == [first]
    assert chosen("--tag", "odd") == [second]
    assert chosen("--noted") == [third]
    failed = cli("ls", run, "--tag", "nowhere", "--noted")
    assert (failed.code, failed.err) == (
        2,
        "rolltape: --tag nowhere --noted: no rollouts match in run exp; `rolltape ls` lists them\n",
    )
    assert cli("tag", run, first, "hack", "--remove").code == 0
    assert read(first).outcome.tags == ("bookmark",)
    assert "0 notes" in cli("note", run, third, "--remove", note.id).out
    assert chosen("--tag", "bookmark") == [first]
    for arguments, why in {
        ("tag", run, first, "x", "--turn", "0.9"): "has no turn",
        ("note", run, first, "x", "--turn", "0.0", "--tokens", "99999"): "tokens 99999 to 100000 asked for; it has",
        ("note", run, first, "x", "--tokens", "1"): "give --turn as well",
        ("note", run, first, "--remove", "nope"): "has no note 'nope'",
        ("note", run, "--edit", "x"): "give ROLLOUT and TEXT",
    }.items():
        failed = cli(*arguments)
        assert failed.code != 0
        assert why in failed.err, failed.err


def test_a_tag_is_removed_only_from_where_it_is(cli: Cli, run: Path, rollout_id: str) -> None:
    assert cli("tag", run, rollout_id, "a", "--turn", "0.0", "--tokens", "3", "--by", "ada").code == 0
    assert cli("tag", run, rollout_id, "b", "--by", "ada").code == 0
    elsewhere = f"rollout {rollout_id} has it elsewhere"
    for arguments, said in (
        (["a"], f"TAG a: not on the rollout itself; {elsewhere}: give --turn 0.0 --tokens 3:4"),
        (["b", "a", "--turn", "0.0"], f"TAG b: not on 0.0; {elsewhere}: give no --turn"),
        (["c"], f"TAG c: rollout {rollout_id} has no such tag; `rolltape tag RUN ROLLOUT` lists them"),
    ):
        assert cli("tag", run, rollout_id, "--remove", *arguments) == (2, "", f"rolltape: {said}\n")
    assert cli("tag", run, rollout_id, "--remove", "a", "--turn", "0.0", "--tokens", "3").code == 0
    assert cli("tag", run, rollout_id, "--remove", "b").out == "0 tags\n"
