"""Tags and notes over HTTP: who may write them, what attacks on the routes that write come to, and what readers see."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

import rolltape
from rolltape.view.serve import ServedAddress, served
from taped import first_turn, next_turn
from viewing import Asking

HOSTILE = "</textarea><script>alert(1)</script>\x00\u202e \U0001fae0 ${7*7} {{7*7}}"


def record_run(path: Path) -> tuple[list[str], str]:
    """Two rollouts, and the first turn of the first."""
    ids = []
    with rolltape.open(path, name="exp") as tape:
        for attempt in range(2):
            with tape.rollout(task_id="t", attempt=attempt) as rollout:
                session = rollout.session()
                next_turn(session, first_turn(session))
                rollout.finish(reward=float(attempt))
            ids.append(rollout.id)
    return ids, f"{ids[0]}.0.0.0"


class Browser:
    """Asks as the page does, with the cookies that it was given."""

    def __init__(self, client: aiohttp.ClientSession, there: ServedAddress) -> None:
        self.client = client
        self.there = there
        self.origin = there.address.rstrip("/")
        self.ask = Asking(client)

    async def post(self, path: str, body: Any, **headers: str | None) -> tuple[int, Any]:
        """What a request of the page comes to; a header that is None is left out."""
        given = {
            "Origin": self.origin,
            "X-Rolltape-Write": "1",
            "Content-Type": "application/json",
            "Sec-Fetch-Site": "same-origin",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {name: value for name, value in given.items() if value is not None}
        async with self.client.post(path, data=raw, headers=sent) as answer:
            return answer.status, await answer.json()


@contextlib.asynccontextmanager
async def browsing(run: Path, *, link: bool = True, **given: Any) -> AsyncIterator[Browser]:
    jar = aiohttp.CookieJar(unsafe=True)
    async with (
        served([str(run)], **{"author": "ada", **given}) as there,
        aiohttp.ClientSession(there.address, cookie_jar=jar) as client,
    ):
        if link:
            async with client.get(there.link(given.get("key"))) as answer:
                assert answer.status == 200
        browser = Browser(client, there)
        if link:
            await browser.ask.caught_up("exp")
        yield browser


def notes_of(run: Path, rollout: str) -> list[tuple[str, str | None]]:
    return [(one.text, one.by) for one in rolltape.read(run).rollout(rollout).annotations.notes]


def journals(run: Path) -> int:
    return len(list((run / "journals").glob("*.sqlite")))


async def test_the_printed_link_lets_one_browser_write_and_what_it_wrote_is_on_the_tape(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (rollout, other), turn = record_run(run)
    async with browsing(run) as page:
        session = await page.ask.json("/api/session")
        assert session == {"annotate": {"author": "ada", "read_only": {}}, "may_share": False, "shared": []}
        assert journals(run) == 1  # nothing was written, so nothing was made
        path = f"/api/exp/rollouts/{rollout}/annotations"
        status, held = await page.post(path, {"text": "deletes the test", "turn": turn})
        assert (status, [one["by"] for one in held["notes"]]) == (200, ["ada"])
        note = held["notes"][0]["id"]
        assert journals(run) == 2
        place = {"turn": turn, "tokens": [1, 2]}
        status, held = await page.post(path, {"add_tags": ["bookmark", "odd"], "by": " bob ", **place})
        assert [(one["name"], one["tokens"], one["by"]) for one in held["tags"]] == [
            ("bookmark", [1, 2], "bob"),
            ("odd", [1, 2], "bob"),
        ]
        await page.post(path, {"remove_tags": ["odd"], **place})
        status, held = await page.post(path, {"note": note, "text": "skips the test", "by": "bob"})
        assert (held["notes"][0]["text"], held["notes"][0]["edited_by"]) == ("skips the test", "bob")
        status, held = await page.post(f"/api/exp/rollouts/{other[:8]}/annotations", {"text": HOSTILE})
        assert (status, held["notes"][0]["text"]) == (200, HOSTILE)
        assert journals(run) == 2
        # The table, the overview and the panel of the run know them at once.
        rows = (await page.ask.json("/api/exp/rollouts?bookmarked=yes"))["rows"]
        assert [(row["id"], row["tags"], row["inner_tags"], row["notes"]) for row in rows] == [
            (rollout, [], ["bookmark"], 1)
        ]
        assert (await page.ask.json("/api/exp/rollouts?noted=yes"))["matched"] == 2
        assert (await page.ask.json("/api/exp/rollouts?noted=no"))["matched"] == 0
        assert (await page.ask.json("/api/exp/rollouts?tag=bookmark"))["matched"] == 1
        overview = await page.ask.json("/api/exp/overview")
        assert (overview["tags"], overview["live"]) == ({"bookmark": 1}, False)  # who only annotates records nothing
        panel = await page.ask.json("/api/exp/notes")
        assert (panel["total"], panel["notes"], panel["bookmarks"]) == (3, 2, 1)
        assert panel["authors"] == {"ada": 2, "bob": 1}
        assert [(one["kind"], one["rollout"]) for one in panel["latest"]] == [
            ("note", other),
            ("tag", rollout),
            ("note", rollout),
        ]
        detail = await page.ask.json(f"/api/exp/rollouts/{rollout}")
        assert [one["text"] for one in detail["annotations"]["notes"]] == ["skips the test"]
        await page.post(path, {"note": note, "text": None})
        assert (await page.ask.json("/api/exp/notes"))["notes"] == 1
        # The link has given its right away.
        again = urlsplit(page.there.link(None))
        async with aiohttp.ClientSession(page.there.address) as second:
            async with second.get(f"{again.path}?{again.query}") as answer:
                assert answer.status == 403
            assert (await Asking(second).json("/api/session"))["annotate"] is None
    assert notes_of(run, rollout) == []
    assert notes_of(run, other) == [(HOSTILE, "ada")]


async def test_nothing_is_written_without_the_right_or_from_elsewhere(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (rollout, _), turn = record_run(run)
    path, note = f"/api/exp/rollouts/{rollout}/annotations", {"text": "x"}
    async with browsing(run, link=False) as stranger:
        status, answer = await stranger.post(path, note)
        assert (status, "may only read" in answer["error"]["message"]) == (403, True)
        assert (await stranger.post(path, note, Cookie="rolltape_annotate_00000000=guess"))[0] == 403
        assert (await stranger.post(path, note, Authorization="Bearer guess"))[0] == 403
        assert (await stranger.post("/api/annotate-link", {}))[0] == 403
    async with browsing(run, author=None, link=False) as reader:  # without --annotate
        status, answer = await reader.post(path, note)
        assert (status, "only reads" in answer["error"]["message"]) == (403, True)
        assert (await reader.ask.json("/api/session"))["annotate"] is None
    async with browsing(run) as page:
        host = urlsplit(page.origin).netloc
        for wrong in (
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Origin": None},
            {"Origin": f"http://{host}.evil.example"},
            {"Origin": "http://127.0.0.1:1"},  # another server of this machine
            {"X_Rolltape_Write": None},
            {"Sec_Fetch_Site": "cross-site"},
            {"Sec_Fetch_Site": "same-site"},
            {"Sec_Fetch_Site": "none"},
            {"Content_Type": "text/plain"},
            {"Content_Type": "application/x-www-form-urlencoded"},
            {"Host": "evil.example"},
        ):
            status, answer = await page.post(path, note, **wrong)
            assert status in (401, 403), (wrong, answer)
        async with page.client.get(f"{path}?text=x", headers={"X-Rolltape-Write": "1"}) as got:
            assert got.status in (404, 405)
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
            async with page.client.request(method, path, json=note) as got:
                assert got.status == 405
        for body, expected in (
            ({"text": "x" * 20_001}, 400),
            (b"x" * 300_000, 413),
            (b"{", 400),
            (b"\xff\xfe", 400),
            ([], 400),
            ({}, 400),
            ({"text": 7}, 400),
            ({"text": "x", "surprise": 1}, 400),
            ({"text": "x", "turn": f"{rollout}.0.0.99"}, 404),
            ({"text": "x", "turn": turn, "tokens": [0, 999]}, 404),
            ({"text": "x", "turn": turn, "tokens": [-1, 1]}, 400),
            ({"text": "x", "tokens": [0, 1]}, 400),
            ({"add_tags": ["two\nlines"]}, 400),
            ({"add_tags": ["x" * 101]}, 400),
            ({"text": "x", "by": "a\nb"}, 400),
            ({"text": "x", "by": "a" * 81}, 400),
            ({"note": "none", "text": "x"}, 404),
        ):
            status, answer = await page.post(path, body)
            assert (status, bool(answer["error"]["message"])) == (expected, True), (body, answer)
        assert (await page.post("/api/exp/rollouts/ffff/annotations", note))[0] == 404
        assert (await page.post("/api/other/rollouts/ffff/annotations", note))[0] == 404
    assert journals(run) == 1
    assert notes_of(run, rollout) == []


async def test_the_cookie_cannot_be_read_by_scripts_nor_sent_by_other_sites(tmp_path: Path) -> None:
    record_run(tmp_path / "run")
    async with browsing(tmp_path / "run", link=False, key="k") as page:
        async with page.client.get(page.there.link("k"), allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/exp")
            cookies = {one.partition("=")[0]: one for one in answer.headers.getall("Set-Cookie")}
        (annotate,) = (one for name, one in cookies.items() if "annotate" in name)
        assert "HttpOnly" in annotate
        assert "SameSite=Strict" in annotate
        # Who holds the right may pass it on, again for one browser.
        status, given = await page.post("/api/annotate-link", {})
        assert status == 200
        link = f"/exp?key=k&{given['query']}"
        async with (
            aiohttp.ClientSession(page.there.address) as second,
            second.get(link, allow_redirects=False) as answer,
        ):
            assert len(answer.headers.getall("Set-Cookie")) == 2


RECORDER = """
import sys, rolltape
from taped import first_turn
with rolltape.open(sys.argv[1], name="exp") as tape:
    rollout = tape.rollout(task_id="live")
    turn = first_turn(rollout.session())
    print(rollout.id, turn.id, flush=True)
    sys.stdin.readline()
    tape.add_note(rollout.id, "from the writer", turn=turn.id, by="recorder")
    rollout.finish(reward=1.0)
"""


def _has_all_notes(answer: Any) -> bool:
    return [row["notes"] for row in answer["rows"]] == [11]


async def test_two_viewers_annotate_a_rollout_while_a_process_records_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-c", RECORDER, str(run)]
    recorder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )
    try:
        assert recorder.stdout is not None
        rollout, turn = (await asyncio.to_thread(recorder.stdout.readline)).split()
        path = f"/api/exp/rollouts/{rollout}/annotations"
        async with browsing(run) as first, browsing(run, author="bob") as second:
            wrote = await asyncio.gather(
                *(page.post(path, {"text": f"{n}", "turn": turn}) for n in range(5) for page in (first, second)),
                *(page.post(path, {"add_tags": [f"tag-{n}"]}) for n in range(3) for page in (first, second)),
            )
            assert {status for status, _ in wrote} == {200}
            await asyncio.to_thread(recorder.communicate, "\n")
            for page in (first, second):
                rows = await page.ask.until("/api/exp/rollouts?status=finished&noted=yes", _has_all_notes)
                row = rows["rows"][0]
                assert sorted(row["tags"]) == ["tag-0", "tag-1", "tag-2"]
                await page.ask.until("/api/exp/overview", lambda one: not one["live"])
    finally:
        recorder.kill()
        recorder.wait()
    expected = [(f"{n}", by) for by in ("ada", "bob") for n in range(5)]
    assert sorted(notes_of(run, rollout)) == sorted([*expected, ("from the writer", "recorder")])
    assert rolltape.read(run).problems() == []


async def test_a_run_that_cannot_be_written_to_says_so(tmp_path: Path) -> None:
    (rollout, _), _ = record_run(tmp_path / "run")
    published = f"memory://annotated/{tmp_path.name}"
    rolltape.seal(tmp_path / "run", to=published)
    jar = aiohttp.CookieJar(unsafe=True)
    async with (
        served([published], author="ada") as there,
        aiohttp.ClientSession(there.address, cookie_jar=jar) as client,
    ):
        assert "holds published shards" in there.read_only[0]
        async with client.get(there.link(None)) as answer:
            assert answer.status == 200
        page = Browser(client, there)
        there.runs.runs["exp"].catch_up(words=False)  # nothing but this process sees that place
        assert "holds published shards" in (await page.ask.json("/api/session"))["annotate"]["read_only"]["exp"]
        status, told = await page.post(f"/api/exp/rollouts/{rollout}/annotations", {"text": "x"})
        assert (status, "serve the run's own directory" in told["error"]["message"]) == (409, True)
