"""Links that open one rollout until they expire: what they open, what they do not, and what tampering comes to."""

import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import aiohttp

import rolltape
from rolltape.view.rights import Share, ShareLinks
from rolltape.view.serve import ServedAddress, served
from taped import first_turn
from viewing import Asking

DAY_S = 24 * 3600


def record_run(path: Path) -> tuple[str, str]:
    """A rollout to share, and one of the same group to keep."""
    ids = []
    with rolltape.open(path, name="exp") as tape:
        for attempt in range(2):
            with tape.rollout(task_id="t", attempt=attempt) as rollout:
                first_turn(rollout.session())
                rollout.finish(reward=1.0)
            ids.append(rollout.id)
    return ids[0], ids[1]


@contextlib.asynccontextmanager
async def sharing(run: Path, *, base_path: str = "") -> AsyncIterator[ServedAddress]:
    async with served([str(run)], key="k", author="ada", base_path=base_path) as there:
        async with aiohttp.ClientSession(there.address, headers={"Authorization": "Bearer k"}) as owner:
            async with owner.get("api/exp/overview") as answer:
                assert answer.status == 200
            there.runs.runs["exp"].catch_up(words=True)
        yield there


@contextlib.asynccontextmanager
async def visiting(there: ServedAddress, link: str | None) -> AsyncIterator[Asking]:
    """Somebody without the key, who has opened a link."""
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(there.address, cookie_jar=jar) as client:
        if link is not None:
            async with client.get(link) as answer:
                assert answer.status == 200
                assert "share=" not in str(answer.url)
        yield Asking(client)


async def test_a_link_opens_its_rollout_and_nothing_else(tmp_path: Path) -> None:
    shared, kept = record_run(tmp_path / "run")
    async with (
        sharing(tmp_path / "run") as there,
        visiting(there, there.share_link("exp", shared, DAY_S)) as guest,
    ):
        detail = await guest.json(f"/api/exp/rollouts/{shared}")
        assert kept not in json.dumps(detail)
        digest = detail["sessions"][0]["turns"][0]["reply"]["digest"]
        for path in (
            "raw",
            "compare?left=exact&right=slime",
            f"messages/{digest}",
            "samples/0/tokens",
            f"turns/{shared}.0.0.0/tokens",
        ):
            async with guest.client.get(f"/api/exp/rollouts/{shared}/{path}") as answer:
                assert answer.status == 200, path
        for path in (f"/exp/rollout/{shared}", f"/exp/rollout/{shared}/tokens/0", "/app.js"):
            async with guest.client.get(path) as answer:
                assert answer.status == 200, path
        session = await guest.json("/api/session")
        assert (session["annotate"], session["may_share"]) == (None, False)
        assert [(one["r"], one["rollout"]) for one in session["shared"]] == [("exp", shared)]
        group = detail["row"]["group"]
        for path in (
            *("/", "/exp", "/exp/rollouts", f"/exp/group/{group}", f"/exp/rollout/{kept}"),
            *("/api/runs", "/api/exp/overview", "/api/exp/rollouts", "/api/exp/tasks", "/api/exp/notes"),
            *(f"/api/pair?left=exp:{shared}&right=exp:{kept}", "/api/compare?left=exp&right=exp"),
            *("/api/exp/live", f"/api/exp/groups/{group}", "/api/exp/trained/0", f"/exp/rollouts/{shared}"),
            *(f"/api/exp/rollouts/{kept}", f"/api/exp/rollouts/{kept}/raw", f"/api/exp/rollouts/{shared[:8]}"),
            *(f"/api/exp/rollouts/{kept}/samples/0/tokens", f"/api/other/rollouts/{shared}"),
            *(f"/api/exp/rollouts/{shared}/../{kept}", f"/api/exp/rollouts/{shared}%2f..%2f{kept}"),
            *(f"/api/exp/rollouts/{shared}/../../overview", f"/exp/rollout/{shared}/../{kept}"),
        ):
            async with guest.client.get(path) as answer:
                assert answer.status in (401, 404), path
                assert "reward" not in await answer.text()
        headers = {"Origin": there.address.rstrip("/"), "X-Rolltape-Write": "1"}
        for path in ("annotations", "share"):
            async with guest.client.post(
                f"/api/exp/rollouts/{shared}/{path}", json={"text": "x"}, headers=headers
            ) as answer:
                assert answer.status == 401
    assert rolltape.read(tmp_path / "run").rollout(shared).annotations.notes == ()


async def test_a_link_that_was_changed_or_has_expired_opens_nothing(tmp_path: Path) -> None:
    shared, kept = record_run(tmp_path / "run")
    async with sharing(tmp_path / "run") as there:
        link = there.share_link("exp", shared, DAY_S)
        token = link.partition("share=")[2]
        payload, signature = token.split(".")
        other = base64.urlsafe_b64encode(json.dumps(["exp", kept, int(time.time()) + DAY_S]).encode()).decode()
        longer = base64.urlsafe_b64encode(json.dumps(["exp", shared, 2**40]).encode()).decode()
        now_s = int(time.time())
        for wrong in (
            *("", ".", "x", "é", token[:-1], f"{token}A", signature, f".{signature}", f"{payload}."),
            *(f"{other.rstrip('=')}.{signature}", f"{longer.rstrip('=')}.{signature}", f"{payload}.{signature[::-1]}"),
            ShareLinks("another key").sign(Share("exp", shared, now_s + DAY_S)),
            ShareLinks("k").sign(Share("exp", shared, now_s)),  # it has just expired
            ShareLinks("k").sign(Share("exp", kept, now_s + DAY_S)),
        ):
            async with visiting(there, None) as guest:
                cookie = {"Cookie": f"rolltape_share_0={quote(wrong)}"}
                for path in (f"/exp/rollout/{shared}?share={wrong}", f"/api/exp/rollouts/{shared}?share={wrong}"):
                    async with guest.client.get(path, headers=cookie, allow_redirects=False) as answer:
                        assert answer.status == 401, path
        clock = [float(now_s)]
        links = ShareLinks("k", now=lambda: clock[0])
        lasting = links.sign(Share("exp", shared, now_s + 10))
        assert links.read(lasting) is not None
        clock[0] += 10
        assert links.read(lasting) is None


async def test_who_has_the_key_makes_links_and_they_work_below_a_base_path(tmp_path: Path) -> None:
    shared, kept = record_run(tmp_path / "run")
    async with sharing(tmp_path / "run", base_path="/x") as there:
        post = f"{there.address}api/exp/rollouts/{shared[:8]}/share"
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer k"}) as owner:
            async with owner.post(post, json={"days": 2}) as answer:
                made = await answer.json()
            for days in (0, -1, 1e9):
                async with owner.post(post, json={"days": days}) as answer:
                    assert answer.status == 400
        assert abs(made["expires_s"] - time.time() - 2 * DAY_S) < 600
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar) as guest:
            async with guest.get(there.address.rstrip("/") + made["path"]) as answer:
                assert (answer.status, urlsplit(str(answer.url)).path) == (200, f"/x/exp/rollout/{shared}")
            for rollout, status in ((shared, 200), (kept, 401)):
                async with guest.get(f"{there.address}api/exp/rollouts/{rollout}") as answer:
                    assert answer.status == status
        # A cookie alone is not enough to ask for a link: another site's page would have it, too.
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            async with browser.get(f"{there.address}exp?key=k") as answer:
                assert answer.status == 200
            async with browser.post(post, json={}, headers={"Origin": "https://evil.example"}) as answer:
                assert answer.status == 403
