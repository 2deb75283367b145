"""Rollouts found by what is said in them."""

from pathlib import Path

import pytest

import rolltape
from rolltape.view.search import SearchIndex
from taped import assistant, first_turn, next_turn, user
from viewing import answers_for

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
        assert page["search"] == {"indexed": 3, "ended": 3}


def test_a_search_for_nothing_is_refused(run: Path) -> None:
    with answers_for(run) as answers, pytest.raises(rolltape.RolltapeError, match="at least one word"):
        answers.search(' "" * ')


def test_search_and_filters_hold_together(run: Path) -> None:
    with answers_for(run) as answers:
        searched = answers.search("dates")()
        page = answers.table({"q": "dates", "min_reward": "2"}, searched)
        assert (page["matched"], page["total"]) == (0, 3)


def test_one_process_writes_the_index_at_a_time(run: Path) -> None:
    with answers_for(run) as answers:
        index = SearchIndex(answers.run.folder.path)
        with pytest.raises(BlockingIOError):
            SearchIndex(answers.run.folder.path)
        index.close()
        SearchIndex(answers.run.folder.path).close()


def test_a_damaged_index_is_made_again(run: Path) -> None:
    with answers_for(run) as answers:
        path = answers.run.folder.path / "search-1.sqlite"
    for name in ("-wal", "-shm"):
        Path(f"{path}{name}").unlink(missing_ok=True)
    path.write_bytes(b"nonsense" * 1000)
    with answers_for(run) as answers:
        assert answers.table({}, answers.search("dates")())["matched"] == 2
