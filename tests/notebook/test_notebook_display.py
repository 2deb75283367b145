"""Samples, trees, sessions, rollouts and runs display themselves: safe, bounded, and legible in any notebook."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import rolltape
from browser import browser_page
from rolltape.demo import record_scripted
from rolltape.importers import import_run
from rolltape.records.rollout import Rollout

HOSTILE = "<script>window.owned=1</script><img src=http://outside.test/x onerror=owned()>\u202e\u200b\x1b[31m\"'>"
REMOTE = re.compile(r"(src|href|url\(|@import)", re.IGNORECASE)
TAGS = {"div", "span", "style", "details", "summary", "table", "tr", "td", "th"}


class Tags(HTMLParser):
    """What elements and attributes a page has, and whether they are closed in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.titles += [value or "" for name, value in attrs if name == "title"]
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if self.open[-1:] == ["style"] else data


def parsed(thing: Any) -> Tags:
    page = Tags()
    page.feed(thing._repr_html_())
    page.close()
    assert page.open == []
    return page


def everything(rollout: Rollout) -> list[Any]:
    made = rolltape.linearize(rollout)
    return [rollout, *rollout.sessions, *map(rolltape.tree_of, rollout.sessions), made, *made.samples()]


def turn(**changes: Any) -> dict[str, Any]:
    given = {
        "prompt_messages": [{"role": "user", "content": "go"}],
        "prompt_ids": [1, 2],
        "sampled_ids": [3, 4],
        "logprobs": [-0.5, None],
        "reply": {"role": "assistant", "content": "so"},
        "finish": "stop",
        "weight_version": "7",
    }
    return given | changes


def recorded(path: Path, *turns: dict[str, Any], **session: Any) -> Rollout:
    with rolltape.open(path, name=HOSTILE) as tape, tape.rollout(task_id=HOSTILE) as rollout:
        own = rollout.session(**session)
        for one in turns:
            own.record_turn(**one)
        rollout.finish(reward=1.0)
    return next(iter(rolltape.read(path).rollouts()))


@pytest.fixture
def scripted(tmp_path: Path) -> Rollout:
    record_scripted(tmp_path / "scripted")
    run = rolltape.read(tmp_path / "scripted")
    return next(one for one in run.rollouts() if one.head.attempt == 0)


def test_a_notebook_shows_what_a_cell_ends_with(tmp_path: Path) -> None:
    record_scripted(tmp_path / "scripted")
    cells = [
        f"import rolltape\nrun = rolltape.read({str(tmp_path / 'scripted')!r})\nrun",
        "rollout = next(one for one in run.rollouts() if one.head.attempt == 0)\nrollout",
        "rollout.sessions[0]",
        "rolltape.tree_of(rollout.sessions[0])",
        "rolltape.linearize(rollout)",
        "next(rolltape.linearize(rollout).samples())",
    ]
    form: Any = nbformat.v4
    notebook = form.new_notebook(cells=[form.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(tmp_path))
    shown = []
    for cell in notebook.cells:
        (output,) = cell.outputs
        assert output.output_type == "execute_result"
        shown.append(output.data["text/html"])
    kinds = [[f'class="rt-{kind}"' in one for kind in ("rows", "turn", "trained")] for one in shown]
    assert kinds == [
        [True, False, False],
        [False, True, False],
        [False, True, False],
        [False, True, False],
        [False, False, True],
        [False, False, True],
    ]


def test_a_sample_shows_its_tokens_and_what_is_known_of_each(scripted: Rollout) -> None:
    *_, third, _ = rolltape.linearize(scripted).samples()
    page = parsed(third)
    assert "sample 2 of 4 · 122 tokens, 5 trained · reward 1" in page.text
    assert "<assistant>All tests pass.<end>" in page.text
    told = next(title for title in page.titles if "turn 0.6" in title and "trained" in title)
    assert re.fullmatch(
        r"token \d+, id \d+\nlogprob -\S+, probability \S+\nweights 8\nturn 0\.6\ntrained", told, re.MULTILINE
    )
    html = third._repr_html_()
    assert html.count('class="rt-trained"') == 5
    assert html.count('class="rt-elsewhere"') == int((third.sampled_mask & ~third.trained_mask).sum())


def test_masked_tokens_are_told_apart_with_the_reason(tmp_path: Path) -> None:
    rollout = recorded(tmp_path / "run", turn())
    (sample,) = rolltape.linearize(rollout).samples()
    page = parsed(sample)
    assert sample._repr_html_().count('class="rt-masked"') == 1
    assert any("no logprob" in title and "masked:no_logprob" in title for title in page.titles)
    assert "1 2 3 4" in page.text  # no tokenizer: ids


def test_a_tree_shows_columns_and_the_causes_of_forks(scripted: Rollout) -> None:
    page = parsed(rolltape.tree_of(scripted.sessions[0]))
    for cause in ("retry", "reply_whitespace", "sub_agent", "compaction"):
        assert cause in page.text
    assert 'departs from turn 5 at message 8: " \\nrun_tests({})" → "\\nrun_tests({})"' in page.text
    html = rolltape.tree_of(scripted.sessions[0])._repr_html_()
    assert html.count("padding-left:18px") == 2  # what was tried again, and what came back changed


def test_a_rollout_shows_facts_tree_and_transcript(scripted: Rollout) -> None:
    text = parsed(scripted).text
    assert "task fix-parser, attempt 0, finished, reward 1" in text
    assert "reward terms: tests 1, length -0.02" in text
    assert "105 sampled tokens: 96 trained, 9 masked:abandoned; 4 samples under exact" in text
    assert 'ask_helper({"question": "Where is the first character read?"})' in text


def test_texts_of_a_rollout_are_text_and_nothing_else(tmp_path: Path) -> None:
    message = {"role": "user", "content": HOSTILE, "reasoning_content": HOSTILE}
    call = {"type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    reply = {"role": "assistant", "content": "\ud800" + HOSTILE, "tool_calls": [call]}
    rollout = recorded(
        tmp_path / "run",
        turn(prompt_messages=[message], reply=reply, weight_version=HOSTILE),
        turn(prompt_messages=[message, {"role": "user", "content": HOSTILE}], error=HOSTILE),
    )
    shown = [*everything(rollout), rolltape.read(tmp_path / "run")]
    for thing in shown:
        page = parsed(thing)
        assert page.tags <= TAGS
        assert page.attributes <= {"class", "style", "title", "open"}
        assert not REMOTE.search(re.sub(r">[^<]*<", "><", re.sub(r'title="[^"]*"', "", thing._repr_html_())))
        assert not re.search(r"[\u202e\u200b\x1b\ud800]", thing._repr_html_())
    with browser_page(width=900, height=700) as browser:
        browser.set_content("".join(thing._repr_html_() for thing in shown))
        assert browser.evaluate("window.owned") is None
        assert browser.evaluate("document.images.length + document.scripts.length") == 0


def test_a_long_sample_shows_its_ends_and_the_least_likely_tokens(tmp_path: Path) -> None:
    count = 200_000
    logprobs = [-0.1] * count
    logprobs[120_000] = -12.5
    rollout = recorded(tmp_path / "run", turn(sampled_ids=list(range(count)), logprobs=logprobs))
    (sample,) = rolltape.linearize(rollout).samples()
    page = parsed(sample)
    assert len(sample._repr_html_()) < 600_000
    assert any(title.startswith("token 120002, id 120000\nlogprob -12.5") for title in page.titles)
    left_out = sum(int(many.replace(",", "")) for many in re.findall(r"([\d,]+) tokens left out", page.text))
    shown = sum(title.startswith("token ") for title in page.titles)
    assert left_out + shown == count
    assert len(rolltape.linearize(rollout)._repr_html_()) < 300_000


def test_a_long_session_is_bounded_and_says_what_is_left_out(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape, tape.rollout(task_id="t") as rollout:
        session = rollout.session()
        last = session.record_turn(**turn(reply={"role": "assistant", "content": "y" * 10_000_000}))
        for number in range(600):
            last = session.record_turn(
                after=last,
                new_messages=[{"role": "tool", "content": f"result {number}"}],
                new_prompt_ids=[5],
                sampled_ids=[6],
                logprobs=[-0.5],
                reply={"role": "assistant", "content": f"reply {number}"},
                finish="stop",
            )
        rollout.finish(reward=1.0)
    (read,) = rolltape.read(tmp_path / "run").rollouts()
    for thing in (read, read.sessions[0], rolltape.tree_of(read.sessions[0])):
        assert len(thing._repr_html_()) < 400_000
        page = parsed(thing)
        assert "turns left out" in page.text
        assert "reply 0" in page.text
        assert "reply 599" in page.text
        assert "reply 300" not in page.text
    assert "9,998,000 characters left out" in parsed(read).text


def test_a_run_shows_its_latest_rollouts(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        for attempt in range(30):
            with tape.rollout(task_id="t", attempt=attempt) as rollout:
                rollout.session().record_turn(**turn())
                rollout.finish(reward=float(attempt % 2))
    shown = rolltape.read(tmp_path / "run")
    aligned = re.findall(r'<th class="rt-number">(\w+)', shown._repr_html_())
    assert aligned == ["step", "attempt", "reward", "turns", "sampled"]
    text = parsed(shown).text
    assert "30 rollouts, 30 finished, mean reward 0.5, 60 sampled tokens" in text
    assert "10 earlier rollouts left out" in text
    assert parsed(_empty(tmp_path / "empty")).text.endswith("0 rollouts, 0 sampled tokens")


def test_the_mean_reward_of_a_run_leaves_out_what_is_not_finite_and_counts_it(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "run") as tape:
        for attempt, reward in enumerate((1.0, 0.0, float("nan"))):
            with tape.rollout(task_id="t", attempt=attempt) as rollout:
                rollout.session().record_turn(**turn())
                rollout.finish(reward=reward)
    text = parsed(rolltape.read(tmp_path / "run")).text
    assert "3 rollouts, 3 finished, mean reward 0.5, 1 reward not finite, 6 sampled tokens" in text


def test_a_run_of_text_says_that_its_tokens_are_not_known(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}\n')
    with rolltape.open(tmp_path / "run") as tape:
        import_run("messages", rows, tape)
    text = parsed(rolltape.read(tmp_path / "run")).text
    assert "1 rollout, 1 finished, no token ids" in text
    assert "0 sampled tokens" not in text


def _empty(path: Path) -> Any:
    rolltape.open(path).close()
    return rolltape.read(path)


@pytest.mark.parametrize(
    ("paper", "ink"), [("rgb(255, 255, 255)", "rgb(20, 20, 20)"), ("rgb(17, 17, 17)", "rgb(221, 221, 221)")]
)
def test_letters_keep_the_notebooks_colour_on_tints(scripted: Rollout, paper: str, ink: str) -> None:
    shown = "".join(thing._repr_html_() for thing in everything(scripted))
    with browser_page(width=900, height=700) as browser:
        browser.set_content(f'<body style="background:{paper};color:{ink}">{shown}</body>')
        colours = browser.evaluate(
            "[...new Set([...document.querySelectorAll('.rolltape *:not(style)')].map(e => getComputedStyle(e).color))]"
        )
        grounds = browser.evaluate(
            "[...document.querySelectorAll('.rt-trained,.rt-masked')].map(e => getComputedStyle(e).backgroundColor)"
        )
        wide = browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert colours == [ink]
    assert all(float(one.rpartition(",")[2].rstrip(")")) < 0.5 for one in grounds)
    assert wide
