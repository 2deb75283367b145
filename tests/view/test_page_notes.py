"""Tags, notes, bookmarks and shared rollouts in a real browser: who may write, what is shown, and where links lead."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import rolltape
from rolltape.cli import run as rolltape_command
from rolltape.view.static import StaticPages
from taped import first_turn, next_turn
from viewed import page_over, serious_findings, serving

HOSTILE = "<img src=x onerror=alert(1)> </textarea><script>alert(1)</script>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with rolltape.open(tmp_path / "exp") as tape:
        for attempt in range(3):
            with tape.rollout(task_id="sums", attempt=attempt, tags=["launched"]) as rollout:
                session = rollout.session()
                next_turn(session, first_turn(session))
                rollout.finish(reward=attempt / 2)
    return tmp_path / "exp"


@pytest.fixture
def page(page: Page) -> Page:
    page.on("dialog", lambda dialog: pytest.fail(f"a text was run: {dialog.message}"))
    return page


@contextmanager
def stranger(page: Page) -> Iterator[Page]:
    """A page with no cookies."""
    assert page.context.browser is not None
    other = page.context.browser.new_page(viewport={"width": 1000, "height": 900})
    try:
        yield other
    finally:
        other.close()


def test_who_opened_the_link_tags_notes_and_stars_and_the_table_finds_it(run: Path, page: Page) -> None:
    rollout = rolltape.read(run).index()[1].id
    with serving(run, author="ada") as there:
        page.goto(there.link(None))
        expect(page).to_have_url(re.compile(r"/exp$"))
        expect(page.get_by_role("region", name="Notes")).to_contain_text("Nobody has tagged or noted anything yet")
        page.goto(f"{there.address}exp/rollout/{rollout}")
        whole = page.get_by_role("group", name="Tags and notes of the rollout")
        expect(whole).to_contain_text("launched")
        whole.get_by_role("button", name="Bookmark the rollout").click()
        expect(whole.get_by_role("button", name="Bookmark the rollout")).to_have_attribute("aria-pressed", "true")
        # A note with a tag, as somebody else than who started the server; the name is kept.
        turn = page.get_by_role("group", name="Tags and notes of turn 1")
        turn.get_by_role("button", name="Tag or note turn 1").click()
        turn.get_by_label("Note on turn 1").fill(HOSTILE)
        turn.get_by_label("Tags of turn 1").fill("odd, sly")
        turn.get_by_label("Your name").fill("bob")
        turn.get_by_role("button", name="Save").click()
        note = turn.get_by_role("article", name="Note on turn 1")
        expect(note).to_contain_text(HOSTILE)
        expect(note).to_contain_text("bob")
        expect(turn.get_by_text("sly")).to_be_visible()
        turn.get_by_role("button", name="Remove the tag sly from turn 1").click()
        expect(turn.get_by_text("sly")).to_have_count(0)
        assert serious_findings(page) == []
        # A token, from the view of tokens; it shows in the transcript, too.
        page.goto(f"{there.address}exp/rollout/{rollout}/tokens/0/4")
        token = page.get_by_role("group", name="Tags and notes of token 4")
        token.get_by_role("button", name="Tag or note token 4").click()
        token.get_by_label("Note on token 4").fill("here it begins")
        token.get_by_label("Note on token 4").press("Control+Enter")
        expect(token.get_by_role("article")).to_contain_text("here it begins")
        expect(page.get_by_role("list", name="Marked tokens")).to_contain_text("token 4")
        page.goto(f"{there.address}exp/rollout/{rollout}")
        marked = page.get_by_role("list", name="Marked tokens").get_by_role("link")
        expect(marked).to_contain_text("here it begins (bob)")
        marked.click()
        expect(page).to_have_url(re.compile(rf"/rollout/{rollout}/tokens/turn/{rollout}\.0\.0\.0/4$"))
        # Filters, and the panel of the run.
        page.goto(f"{there.address}exp/rollouts")
        expect(page.get_by_role("row")).to_have_count(4)
        page.get_by_role("button", name="bookmarked", exact=True).click()
        expect(page.get_by_role("row")).to_have_count(2)
        expect(page).to_have_url(re.compile(r"bookmarked=yes"))
        expect(page.get_by_role("row").nth(1)).to_contain_text("2 notes")
        page.goto(f"{there.address}exp/rollouts?tag=odd")
        expect(page.get_by_role("row")).to_have_count(2)
        page.goto(f"{there.address}exp")
        panel = page.get_by_role("region", name="Notes")
        expect(panel).to_contain_text("2 notes, 1 bookmark")
        expect(panel.get_by_role("listitem")).to_have_count(4)
        panel.get_by_label("Notes of").select_option("ada")
        expect(panel.get_by_role("listitem")).to_have_count(1)
        panel.get_by_label("Notes of").select_option("")
        assert serious_findings(page) == []
        panel.get_by_role("link", name=re.compile("here it begins")).click()
        expect(page).to_have_url(re.compile(r"/tokens/turn/.*/4$"))
        # The right is passed on by a link, to one browser.
        page.goto(f"{there.address}exp")
        panel.get_by_role("button", name="invite somebody").click()
        invitation = panel.get_by_label("Link that lets somebody else annotate").input_value()
        with stranger(page) as invited:
            invited.goto(invitation)
            expect(invited.get_by_role("button", name="invite somebody")).to_be_visible()
            invited.context.clear_cookies()
            assert (answer := invited.goto(invitation)) is not None
            assert answer.status == 403
        # A note is changed and taken back.
        page.goto(f"{there.address}exp/rollout/{rollout}")
        note.get_by_role("button", name="edit").click()
        turn.get_by_label("Note on turn 1").fill("in other words")
        turn.get_by_role("button", name="Save").click()
        expect(note).to_contain_text("in other words")
        note.get_by_role("button", name="remove").click()
        expect(note).to_have_count(0)
        # Somebody without the right sees all of it, and no way to change it.
        with stranger(page) as reader:
            reader.goto(f"{there.address}exp/rollout/{rollout}")
            expect(reader.get_by_text("bookmarked", exact=True)).to_be_attached()
            expect(reader.get_by_role("list", name="Marked tokens")).to_contain_text("here it begins")
            expect(reader.get_by_role("button", name=re.compile("Bookmark|Tag or note"))).to_have_count(0)
    held = rolltape.read(run).rollout(rollout).annotations
    assert [(one.name, one.turn, one.tokens, one.by) for one in held.tags] == [
        ("launched", None, None, None),
        ("bookmark", None, None, "ada"),
        ("odd", f"{rollout}.0.0.1", None, "bob"),
    ]
    assert [(one.text, one.turn, one.tokens) for one in held.notes] == [("here it begins", f"{rollout}.0.0.0", (4, 5))]


def test_notes_of_others_appear_while_one_reads_and_are_in_exported_pages(
    run: Path, page: Page, tmp_path: Path
) -> None:
    rollout = rolltape.read(run).index()[0].id
    with serving(run) as there:
        page.goto(f"{there.address}exp/rollout/{rollout}")
        expect(page.get_by_role("group", name="Tags and notes of turn 0")).to_have_count(0)
        with rolltape.open(run) as tape:
            tape.add_note(rollout, "key sk-abcdefghijklmnop1234567890 leaked", turn=f"{rollout}.0.0.0", by="carol")
        expect(page.get_by_role("article", name="Note on turn 0")).to_contain_text("carol")
    with StaticPages(str(run)) as pages:
        list(pages.write(tmp_path / "out", pages.chosen([])))
    page.goto((tmp_path / "out" / "index.html").as_uri())
    expect(page.get_by_role("region", name="Notes")).to_contain_text("key [masked] leaked")
    page.get_by_role("region", name="Notes").get_by_role("link", name=re.compile("leaked")).click()
    expect(page.get_by_role("article", name="Note on turn 0")).to_contain_text("key [masked] leaked")


def test_a_shared_rollout_opens_for_who_has_no_key_and_leads_nowhere_else(run: Path, page: Page) -> None:
    shared, kept = (row.id for row in rolltape.read(run).index()[:2])
    with serving(run, key="k") as there:
        page.goto(f"{there.address}exp/rollout/{shared}?key=k")
        page.get_by_role("button", name="Share").click()
        page.get_by_role("button", name="Make the link").click()
        link = page.get_by_label("Link", exact=True).input_value()
        assert serious_findings(page) == []
        with stranger(page) as guest:
            guest.goto(link)
            expect(guest).to_have_url(f"{there.address}exp/rollout/{shared}")
            expect(
                guest.get_by_role("status").filter(has_text="This rollout was shared with you until")
            ).to_be_visible()
            expect(guest.get_by_text("go on 0")).to_be_visible()
            expect(guest.get_by_role("link", name="Group")).to_have_count(0)
            expect(guest.get_by_role("link", name="exp")).to_have_count(0)
            expect(guest.get_by_role("button", name=re.compile("Share|Next rollout"))).to_have_count(0)
            guest.get_by_role("link", name="Tokens", exact=True).click()
            expect(guest.get_by_role("heading", name="Sample 0")).to_be_visible()
            answer = guest.goto(f"{there.address}exp/rollout/{kept}")
            assert answer is not None
            assert answer.status == 401


def test_a_search_shows_the_line_of_a_note_as_text(run: Path, page: Page) -> None:
    rollout = rolltape.read(run).index()[2].id
    assert rolltape_command(["note", str(run), rollout, f"odd\n{HOSTILE}\nend"]) == 0
    with page_over(run) as address:
        page.goto(f"{address}/exp/rollouts?q=onerror")
        expect(page.locator(".row")).to_have_count(1)
        expect(page.locator(".row .line")).to_have_text(f"note {HOSTILE}")
        expect(page.locator(".row mark")).to_have_text("onerror")
