"""Pages that are written to files: whole, without a server, and without anybody's keys."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import rolltape
from rolltape.tape.recording import tape as tape_module
from rolltape.view import static_page
from rolltape.view.rollout import messages
from rolltape.view.rollout.masking import MASKED, Mask
from rolltape.view.static import StaticPages
from taped import assistant, first_turn, next_turn, record_run, user

_PAGE = {
    "index.html": (
        "text/html",
        b'<!doctype html><html><head><link rel="icon" href="/icon.svg"/><script defer src="/app.js"></script>'
        b'<link rel="stylesheet" href="/app.css"></head><body><div id="app"></div></body></html>',
    ),
    "app.js": ("text/javascript", b"let a = 1;"),
    "on-demand/more.js": ("text/javascript", b"let b = 2;"),
    "app.css": ("text/css", b"@font-face{src:url(./fonts/x.woff2)}body{color:red}"),
    "fonts/x.woff2": ("font/woff2", b"font"),
}
_KEY = "ghp_" + "Ab1" * 9


class Blocks(HTMLParser):
    """The scripts and links of a page, as a browser takes it apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.answers: dict[str, Any] = {}
        self.programs: list[str] = []
        self.asked: list[str] = []
        self._open: dict[str, str | None] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.asked += [value for name, value in attrs if name in ("src", "href") and value]
        self._open = given if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._open is None:
            return
        path = self._open.get("data-path")
        if path is None:
            self.programs.append(data)
        else:
            self.answers[path] = data if "data-base64" in self._open else json.loads(data)


@pytest.fixture(autouse=True)
def page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_page, "page_files", lambda: _PAGE)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with rolltape.open(tmp_path / "run", name="exp") as tape, tape.rollout(task_id="t") as rollout:
        session = rollout.session()
        turn = first_turn(session, reply=assistant(f"</script><script>alert(1)</script> {_KEY} \u2028"))
        next_turn(session, turn)
        rollout.finish(reward=float("nan"))
    return tmp_path / "run"


def written(run: Path, folder: Path, *rollouts: str, mask: bool = True) -> dict[str, Blocks]:
    with StaticPages(str(run), mask=mask) as pages:
        files = list(pages.write(folder, pages.chosen(rollouts)))
    return {file.name: Blocks(file.read_text()) for file in files}


def test_a_page_carries_the_answers_that_it_would_ask_for(run: Path, tmp_path: Path) -> None:
    (rollout_id,) = (row.id for row in rolltape.read(run).index())
    pages = written(run, tmp_path / "out")
    (group,) = (row.head.group for row in rolltape.read(run).index())
    assert sorted(pages) == [f"group-{group}.html", "index.html", f"rollout-{rollout_id}.html"]
    own = pages[f"rollout-{rollout_id}.html"].answers
    detail = own[f"/api/run/rollouts/{rollout_id}"]
    assert detail["row"]["reward"] == {"$float": "nan"}
    assert [len(one["turns"]) for one in detail["sessions"]] == [2]
    assert own["/static"]["start"] == f"/run/rollout/{rollout_id}"
    assert own["/static"]["files"] == {
        "/run": "index.html",
        f"/run/rollout/{rollout_id}": f"rollout-{rollout_id}.html",
        f"/run/compare/{rollout_id}": f"rollout-{rollout_id}.html",
        f"/run/group/{group}": f"group-{group}.html",
    }
    index = pages["index.html"].answers
    assert [row["id"] for row in index["/api/run/rollouts"]["rows"]] == [rollout_id]
    assert index["/api/run/overview"]["rollouts"] == 1
    attempts = pages[f"group-{group}.html"].answers[f"/api/run/groups/{group}"]["rollouts"]
    assert [attempt["id"] for attempt in attempts] == [rollout_id]


def test_pages_share_one_program_and_run_and_ask_for_nothing_else(run: Path, tmp_path: Path) -> None:
    pages = written(run, tmp_path / "out")
    [shared] = (one for one in (tmp_path / "out").iterdir() if one.is_dir())
    assert {str(path.relative_to(shared)): path.read_text() for path in shared.rglob("*") if path.is_file()} == {
        "app.js": "let a = 1;",
        "on-demand/more.js": "let b = 2;",
        "app.css": "@font-face{src:url(data:font/woff2;base64,Zm9udA==)}body{color:red}",
    }
    nonces = set()
    for name, page in pages.items():
        assert page.asked == [f"{shared.name}/app.css", f"{shared.name}/app.js"]
        assert page.programs == []
        text = (tmp_path / "out" / name).read_text()
        assert "<script>alert(1)" not in text
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
        assert policy is not None
        directives = dict(one.strip().split(" ", 1) for one in policy[1].split(";"))
        nonce = re.fullmatch(r"'nonce-([\w-]{24})'", directives["script-src"])
        assert nonce is not None
        nonces.add(nonce[1])
        assert directives == {
            "default-src": "'none'",
            "script-src": nonce[0],
            "style-src": nonce[0],
            "font-src": "data:",
            "img-src": "data:",
            "base-uri": "'none'",
            "form-action": "'none'",
        }
        assert text.count(f'nonce="{nonce[1]}"') == 2  # the program's and the styles'
        assert str(tmp_path) not in text
    assert len(nonces) == len(pages)


def test_another_version_of_the_program_leaves_pages_of_an_earlier_one_their_own(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(run, tmp_path / "out")
    monkeypatch.setattr(static_page, "page_files", lambda: _PAGE | {"app.js": ("text/javascript", b"let a = 3;")})
    written(run, tmp_path / "out")
    assert sorted(path.read_text() for path in (tmp_path / "out").glob("page-*/app.js")) == ["let a = 1;", "let a = 3;"]


def test_keys_are_masked_and_counted_unless_told_otherwise(run: Path, tmp_path: Path) -> None:
    with StaticPages(str(run)) as pages:
        files = list(pages.write(tmp_path / "out", pages.chosen([])))
        assert pages.masked == 1
    assert all(_KEY not in file.read_text() for file in files)
    assert any(MASKED in file.read_text() for file in files)
    # Each page says how many are masked in it: those of the rollout and of its group show the message, the run's not.
    assert [Blocks(file.read_text()).answers["/static"]["masked"] for file in files] == [1, 1, 0]
    # Without a tokenizer nobody here knows which ids spell the key, so they are not handed on either.
    assert not any("tokens" in path for file in files for path in Blocks(file.read_text()).answers)
    kept = written(run, tmp_path / "kept", mask=False)
    assert any(_KEY in json.dumps(page.answers) for page in kept.values())
    assert any("tokens" in path for page in kept.values() for path in page.answers)


@pytest.mark.parametrize(
    "text",
    [
        f"export TOKEN={_KEY}",
        "sk-" + "proj-" + "a1B2" * 6,
        "AKIA" + "ABCD1234" * 2,
        "Authorization: Bearer " + "abc123" * 4,
        '"api_key": "' + "0f1e2d3c" * 3 + '"',
        "password=hunter2hunter2",
        "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
        "hf_" + "aB3" * 8,
        '{"command": "export PASSWORD=\\"hunter2hunter2\\""}',
        '{"body": "{\\"api_key\\": \\"0f1e2d3c0f1e2d3c\\"}"}',
        "git clone https://me:hunter2@example.org/x.git",
        "TOKEN=0f1e2d3c4b5a6978",
        "Authorization: Basic dXNlcjpwYXNzd29yZDE=",
    ],
)
def test_what_looks_like_a_key_is_masked(text: str) -> None:
    mask = Mask()
    assert MASKED in mask.text(text)
    assert len(mask.masked) == 1


@pytest.mark.parametrize(
    "text",
    [
        "the password is wrong, try again tomorrow",
        "token = get_token(request)",
        "sk-learn is short for scikit-learn",
        "commit 0f1e2d3c4b5a69788796a5b4c3d2e1f001234567",
        "max_tokens: 4096, temperature=0.7",
    ],
)
def test_what_does_not_look_like_a_key_stays(text: str) -> None:
    assert Mask().text(text) == text


def test_the_rest_of_a_key_does_not_stay_where_a_fork_is_explained(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="exp") as tape, tape.rollout(task_id="t") as rollout:
        session = rollout.session()
        first_turn(session, reply=assistant(f"use {_KEY} then"))
        echoed = [user("hello"), assistant(f"use {_KEY[:10]} then"), user("?")]
        first_turn(session, prompt_messages=echoed, prompt_ids=[1, 2, 3, 9])
        rollout.finish(reward=1.0)
    (made,) = rolltape.read(tmp_path / "run").rollouts()
    assert [_KEY[10:] in str(fork.text) for fork in rolltape.linearize(made).forks] == [True]
    pages = written(tmp_path / "run", tmp_path / "out")
    assert all(_KEY[10:] not in json.dumps(page.answers) for page in pages.values())


def test_a_rollout_is_named_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    pages = written(tmp_path / "run", tmp_path / "out", ids[1][:8])
    assert f"rollout-{ids[1]}.html" in pages
    assert not any(ids[0] in json.dumps(page.answers) for page in pages.values())
    with StaticPages(str(tmp_path / "run")) as named, pytest.raises(rolltape.RolltapeError, match="holds no rollout"):
        named.chosen(["nope"])


def test_of_a_rollout_that_was_run_again_the_try_that_counts_is_written(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run", name="exp") as tape:
        with tape.rollout(task_id="t") as rollout:
            first_turn(rollout.session())
            rollout.finish(reward=1.0)
        tape.rollout(task_id="t", new_try=True).fail("it broke")
    pages = written(tmp_path / "run", tmp_path / "out")
    for page in pages.values():
        assert [(row["try"], row["reward"]) for row in page.answers["/api/run/rollouts"]["rows"]] == [(0, 1.0)]


def test_where_the_page_is_not_built_that_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_page, "page_files", lambda: {"index.html": _PAGE["index.html"]})
    with pytest.raises(rolltape.RolltapeError, match="not built"):
        StaticPages(str(run))


def test_tokens_that_spell_a_key_are_put_out(tmp_path: Path) -> None:
    words = ["use", _KEY[:9], _KEY[9:], "."]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="use"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with rolltape.open(tmp_path / "run", name="exp") as tape, tape.rollout(task_id="t") as rollout:
        session = rollout.session(tokenizer=str(tmp_path / "tokenizer.json"))
        first_turn(session, prompt_ids=[0], sampled_ids=[1, 2, 3], logprobs=[-1.0, -1.0, -1.0])
        rollout.finish(reward=1.0)
    pages = written(tmp_path / "run", tmp_path / "out")
    (packed,) = [
        base64.b64decode(answer) for page in pages.values() for path, answer in page.answers.items() if "tokens" in path
    ]
    size = int.from_bytes(packed[:8], "little")
    header = msgspec.json.decode(packed[8 : 8 + size])
    ids = next(column for column in header["columns"] if column["name"] == "ids")
    assert np.frombuffer(packed, "<i4", 4, 8 + size + ids["offset"]).tolist() == [0, -1, -1, 3]
    assert _KEY[:9].encode() not in packed


def record_texts(run: Path, *rollouts: list[str]) -> list[str]:
    """Rollouts of one group in which these texts are said."""
    ids = []
    with rolltape.open(run, name="exp") as tape:
        for attempt, texts in enumerate(rollouts):
            with tape.rollout(task_id="t", attempt=attempt) as rollout:
                session = rollout.session()
                first_turn(session, prompt_messages=[user(text) for text in texts])
                rollout.finish(reward=1.0)
                ids.append(rollout.id)
    return ids


def test_a_key_is_masked_where_nothing_names_it_and_in_pages_that_come_first(tmp_path: Path) -> None:
    secret = "Tr0ub4dor-and-3"
    record_texts(tmp_path / "run", [f"it says {secret} here"], ["nothing"], [f"password: {secret}"])
    with StaticPages(str(tmp_path / "run")) as pages:
        files = list(pages.write(tmp_path / "out", pages.chosen([])))
        assert pages.masked == 1
    assert not any(secret in file.read_text() for file in files)
    told = [Blocks(file.read_text()).answers["/static"]["masked"] for file in files]
    assert told == [1, 0, 1, 1, 0]  # three rollouts, their group, the run


def test_the_beginning_of_a_key_does_not_stay_where_a_text_is_cut(tmp_path: Path) -> None:
    text = "x" * (messages.LONGEST_TEXT - 16) + f" {_KEY}"
    record_texts(tmp_path / "run", [text])
    for page in written(tmp_path / "run", tmp_path / "out").values():
        assert _KEY[:12] not in json.dumps(page.answers)


def test_a_page_knows_the_files_of_its_group_and_the_runs_page_all(tmp_path: Path) -> None:
    ids = record_run(tmp_path / "run")
    pages = written(tmp_path / "run", tmp_path / "out")
    own = pages[f"rollout-{ids[0]}.html"].answers["/static"]["files"]
    assert [one for one in ids if f"/run/rollout/{one}" in own] == [ids[0]]
    assert {f"/run/rollout/{one}" for one in ids} <= set(pages["index.html"].answers["/static"]["files"])


def test_a_group_that_is_a_path_and_markup_stays_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No run of ours has one, but a run may come from anybody.
    monkeypatch.setattr(tape_module, "group_id", lambda *_, **__: '../../x"><script>alert(1)</script>')
    record_texts(tmp_path / "run", ["hello"])
    pages = written(tmp_path / "run", tmp_path / "out" / "deep" / "down")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["deep"]
    assert len(pages) == 3
    for page in pages.values():
        assert page.programs == []
