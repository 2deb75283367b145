"""Rollouts found by what is said in them."""

import shutil
from pathlib import Path

import pytest

import rolltape
from rolltape.cli import run as rolltape_command
from rolltape.tape.index import search
from taped import assistant, first_turn, next_turn, record_run, user
from viewing import answers_for, asking

_SYSTEM = {"role": "system", "content": "You are a careful helper. Answer in prose."}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with rolltape.open(tmp_path / "run", name="run") as tape:
        for attempt, (asked, answered) in enumerate(
            [
                ("What is in foo_bar.py?", "A parser for dates."),
                ("List the files", "Nothing but dates in there."),
                ("文件里有什么？", "日期解析器 in the file"),
            ]
        ):
            with tape.rollout(task_id="t", attempt=attempt) as rollout:
                session = rollout.session()
                turn = first_turn(session, prompt_messages=[_SYSTEM, user(asked)], reply=assistant(answered))
                call = {"id": "c", "function": {"name": "grep", "arguments": f'{{"pattern": "needle{attempt}"}}'}}
                reply = {"role": "assistant", "reasoning_content": f"hmm thought{attempt}", "tool_calls": [call]}
                next_turn(session, turn, reply=reply)
                rollout.finish(reward=1.0)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("asked", "attempts"),
    [
        ("dates", [0, 1]),
        ("DATES", [0, 1]),
        ("dates parser", [0]),
        ("careful", [0, 1, 2]),  # in the system prompt that all share
        ("careful parser", [0]),  # one word there, one in a reply
        ('"careful helper"', [0, 1, 2]),
        ('"helper careful"', []),
        ('"for dates"', [0]),
        ("foo_bar.py", [0]),
        ("parse*", [0]),
        ("parse", []),
        ("needle1", [1]),
        ("thought2", [2]),
        ("grep", [0, 1, 2]),
        ("日期", [2]),
        ("期日", []),
        ('"py A"', []),  # a phrase does not reach from one message into the next
        ("needle1 OR needle2", []),  # no query language: OR is a word
        ('unbalanced " quote', []),
        ("nowhere", []),
    ],
)
def test_a_rollout_is_found_by_all_words_and_phrases_that_occur_in_it(
    run: Path, asked: str, attempts: list[int]
) -> None:
    with answers_for(run) as answers:
        page = answers.table({"q": asked}, answers.search(asked)())
        assert [row["attempt"] for row in page["rows"]] == attempts
        assert page["search"] == {"searched": 3, "total": 3}


def test_a_search_for_nothing_is_refused(run: Path) -> None:
    with answers_for(run) as answers, pytest.raises(rolltape.RolltapeError, match="at least one word"):
        answers.search(' "" * ')


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "a needle"},
        {"type": "tool_use", "name": "grep", "input": {"pattern": "needle"}},
        {"type": "tool_result", "content": [{"type": "text", "text": "the needle"}]},
        {"type": "text", "text": "needle"},
    ],
)
def test_what_is_said_in_parts_of_a_message_is_found(tmp_path: Path, part: dict[str, object]) -> None:
    with rolltape.open(tmp_path / "run", name="run") as tape, tape.rollout(task_id="t") as rollout:
        first_turn(rollout.session(), prompt_messages=[{"role": "user", "content": [part]}])
        rollout.finish(reward=1.0)
    with answers_for(tmp_path / "run") as answers:
        assert answers.table({}, answers.search("needle")())["matched"] == 1


def test_search_and_filters_hold_together(run: Path) -> None:
    with answers_for(run) as answers:
        searched = answers.search("dates")()
        page = answers.table({"q": "dates", "min_reward": "2"}, searched)
        assert (page["matched"], page["total"]) == (0, 3)


def test_a_damaged_index_is_made_again(run: Path) -> None:
    with answers_for(run):
        pass
    for path in (run / "cache").glob("index-*.sqlite*"):
        path.write_bytes(b"nonsense" * 1000) if path.suffix == ".sqlite" else path.unlink()
    with answers_for(run) as answers:
        assert answers.table({}, answers.search("dates")())["matched"] == 2


async def test_a_second_server_on_a_run_finds_what_the_first_one_indexes(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    async with asking(tmp_path / "run") as first, asking(tmp_path / "run") as second:
        for ask in (first, second):
            await ask.caught_up("exp")
            await ask.until("/api/exp/rollouts?q=hello", lambda page: page["matched"] == 3)
        with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="later") as rollout:
            first_turn(rollout.session(), reply=assistant("zebra"))
            rollout.finish(reward=1.0)
        for ask in (first, second):
            page = await ask.until("/api/exp/rollouts?q=zebra", lambda page: page["matched"] == 1)
            assert page["search"] == {"searched": 4, "total": 4}


async def test_the_folder_of_the_cache_may_be_deleted_while_it_is_used(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    async with asking(tmp_path / "run") as ask:
        await ask.until("/api/exp/rollouts?q=hello", lambda page: page["matched"] == 3)
        # At once: a file that is made meanwhile would stop `rmtree`.
        shutil.rmtree((tmp_path / "run" / "cache").rename(tmp_path / "deleted"))
        page = await ask.json("/api/exp/rollouts?q=hello")
        assert page["matched"] == page["search"]["searched"]  # what is not in the index is not said to be searched
        await ask.until("/api/exp/rollouts?q=hello", lambda page: page["matched"] == 3)
        with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="later") as rollout:
            first_turn(rollout.session(), reply=assistant("zebra"))
            rollout.finish(reward=1.0)
        page = await ask.until("/api/exp/rollouts?q=zebra", lambda page: page["matched"] == 1)
        assert page["rows"][0]["trained_tokens"] == 2


def test_an_index_of_a_run_that_was_here_before_is_made_again(tmp_path: Path) -> None:
    for text in ("zebra", "giraffe"):  # the same rollout by its id, saying something else
        with rolltape.open(tmp_path / "run", name="run") as tape, tape.rollout(task_id="t") as rollout:
            first_turn(rollout.session(), reply=assistant(text))
            rollout.finish(reward=1.0)
        with answers_for(tmp_path / "run") as answers:
            assert answers.table({}, answers.search(text)())["matched"] == 1
        for name in ("journals", "run.json"):
            target = tmp_path / "run" / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()


def test_what_cannot_be_searched_still_has_its_figures(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(connection: object, number: int, messages: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(search, "add", odd)
    with answers_for(run) as answers:
        assert [row["trained_tokens"] for row in answers.table({}, None)["rows"]] == [4, 4, 4]
        assert answers.overview(None)["problem_list"] == ["its messages cannot be searched: too deep"] * 3
        assert answers.table({}, answers.search("dates")())["search"] == {"searched": 0, "total": 3}


def test_messages_are_searched_without_their_tokens_where_a_summary_is_there(run: Path) -> None:
    with answers_for(run, search=False) as answers:
        assert answers.overview(None)["progress"]["searchable"] == 0
        answers.run.index.load_with_problems = None  # type: ignore[assignment,method-assign]
        answers.run.catch_up(words=True)
        assert answers.table({}, answers.search("careful parser")())["matched"] == 1
    rolltape.seal(run)
    shutil.rmtree(run / "cache")
    with answers_for(run, search=False) as answers:
        answers.run.catch_up(words=True)
        assert answers.table({}, answers.search("careful parser")())["matched"] == 1


def test_a_rollout_that_runs_is_found_by_what_it_has_said_so_far(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="run") as tape:
        rollout = tape.rollout(task_id="t")
        session = rollout.session()
        turn = first_turn(session, prompt_messages=[_SYSTEM, user("hello")], reply=assistant("a zebra"))
        with answers_for(tmp_path / "run") as answers:

            def found(asked: str) -> tuple[int, dict[str, int]]:
                answers.run.catch_up(words=True)
                page = answers.table({}, answers.search(asked)())
                return page["matched"], page["search"]

            assert found("zebra") == (1, {"searched": 1, "total": 1})
            assert found("careful zebra") == (1, {"searched": 1, "total": 1})
            assert found("giraffe") == (0, {"searched": 1, "total": 1})
            next_turn(session, turn, reply=assistant("a giraffe"))
            assert found('"a giraffe"') == (1, {"searched": 1, "total": 1})
            rollout.finish(reward=1.0)
            assert found("giraffe zebra") == (1, {"searched": 1, "total": 1})


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ("dates", "assistant: A parser for [dates]."),
        ("dates parser", "assistant: A [parser] for [dates]."),
        ('"for dates"', "assistant: A parser [for dates]."),
        ("parse*", "assistant: A [parse]r for dates."),
        ("careful", "system: You are a [careful] helper. Answer in prose."),
        ("foo_bar.py", "user: What is in [foo_bar.py]?"),
        ("needle0", 'assistant: {"pattern": "[needle0]"}'),
        ("nowhere", None),
    ],
)
def test_the_line_that_was_found_is_shown_with_what_was_asked_for(run: Path, asked: str, line: str | None) -> None:
    with answers_for(run) as answers:
        row = answers.table({}, None)["rows"][0]
        name = f"{row['id']}.0"
        found = answers.lines({"q": asked, "rollouts": name})()["lines"][name]
        if line is None:
            assert found is None
        else:
            parts = "".join(f"[{part['text']}]" if part["found"] else part["text"] for part in found["parts"])
            assert f"{found['role']}: {parts}" == line


def test_a_long_line_is_cut_around_what_was_found(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="run") as tape, tape.rollout(task_id="t") as rollout:
        text = "before " * 200 + "needle " + "after " * 200
        first_turn(rollout.session(), prompt_messages=[user(text)])
        rollout.finish(reward=1.0)
    with answers_for(tmp_path / "run") as answers:
        name = f"{answers.table({}, None)['rows'][0]['id']}.0"
        parts = answers.lines({"q": "needle", "rollouts": name})()["lines"][name]["parts"]
        assert [part["text"] for part in parts if part["found"]] == ["needle"]
        assert sum(len(part["text"]) for part in parts) < 260
        with pytest.raises(rolltape.RolltapeError, match="whole number"):
            answers.lines({"q": "needle", "rollouts": "x.y"})


def test_lines_need_words_and_are_limited(run: Path) -> None:
    with answers_for(run) as answers:
        for query in ({"q": "*", "rollouts": "x.0"}, {"q": "word", "rollouts": ",".join(["x.0"] * 65)}):
            with pytest.raises(rolltape.RolltapeError, match="at least one word"):
                answers.lines(query)


def test_a_note_is_found_as_it_is_now_also_beside_words_of_messages(run: Path) -> None:
    second = next(row.id for row in rolltape.read(run).index() if row.head.attempt == 1)
    assert rolltape_command(["note", str(run), second, "Looks like reward hacking."]) == 0
    with answers_for(run) as answers:

        def found(asked: str) -> list[int]:
            return [row["attempt"] for row in answers.table({"q": asked}, answers.search(asked)())["rows"]]

        assert found("hacking") == [1]
        assert found('"reward hacking" files') == [1]  # a phrase of the note, a word of a message
        assert found("hacking parser") == []
        assert found("dates") == [0, 1]
        line = answers.lines({"q": "hacking", "rollouts": f"{second}.0"})()["lines"][f"{second}.0"]
        assert line["role"] == "note"
        assert [part["text"] for part in line["parts"] if part["found"]] == ["hacking"]
        (note,) = (one.id for one in answers.load_annotations()[second, 0].notes)
    assert rolltape_command(["note", str(run), second, "--remove", note]) == 0
    with answers_for(run) as answers:
        assert answers.table({"q": "hacking"}, answers.search("hacking")())["rows"] == []
