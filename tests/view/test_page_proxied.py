"""The page behind a reverse proxy that serves it below a path: its files, answers, live events, links and key."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from playwright.sync_api import expect

import rolltape
from browser import browser_page
from rolltape.errors import ViewError
from rolltape.serving import listening_url
from rolltape.view.serve import served
from taped import first_turn
from viewed import page_over

BASE = "/team/rolltape"
_OWN = ("Connection", "Content-Encoding", "Content-Length", "Transfer-Encoding")  # headers of one connection


@asynccontextmanager
async def proxy(upstream: str, *, removes_base: bool) -> AsyncIterator[str]:
    """The address of a proxy that passes on what is asked below the base path, and answers 404 to all else."""
    async with aiohttp.ClientSession(auto_decompress=True, cookie_jar=aiohttp.DummyCookieJar()) as client:

        async def pass_on(request: web.Request) -> web.StreamResponse:
            asked = str(request.rel_url)
            asked = "/" + asked.removeprefix(BASE).lstrip("/") if removes_base else asked
            headers = {name: value for name, value in request.headers.items() if name not in ("Host", "Connection")}
            async with client.get(upstream + asked, headers=headers, allow_redirects=False) as found:
                kept = [(name, value) for name, value in found.headers.items() if name not in _OWN]
                answer = web.StreamResponse(status=found.status)
                answer.headers.extend(kept)
                await answer.prepare(request)
                async for chunk in found.content.iter_any():
                    await answer.write(chunk)
                return answer

        app = web.Application()
        app.add_routes([web.get(BASE, pass_on), web.get(f"{BASE}/{{rest:.*}}", pass_on)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield listening_url(runner) + BASE
        finally:
            await runner.cleanup()


@contextmanager
def proxied(upstream: str, *, removes_base: bool) -> Iterator[str]:
    """The same in a thread, since Playwright's calls block."""
    ready: queue.Queue[tuple[str, Callable[[], object]]] = queue.Queue()

    async def serve() -> None:
        over = asyncio.Event()
        async with proxy(upstream, removes_base=removes_base) as address:
            ready.put((address, partial(asyncio.get_running_loop().call_soon_threadsafe, over.set)))
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    address, end = ready.get(timeout=60)
    try:
        yield address
    finally:
        end()
        thread.join()


@pytest.mark.parametrize("removes_base", [True, False], ids=["removed", "left"])
def test_everything_works_below_a_path(tmp_path: Path, *, removes_base: bool) -> None:
    with rolltape.open(tmp_path / "run", name="exp") as tape:
        with tape.rollout(task_id="first") as rollout:
            first_turn(rollout.session())
            rollout.finish(reward=1.0)
        with (
            page_over(tmp_path / "run", base_path=BASE) as inner,
            proxied(inner.removesuffix(BASE), removes_base=removes_base) as address,
            browser_page(width=1400, height=900) as page,
        ):
            asked: list[tuple[int, str]] = []
            page.on("response", lambda answer: asked.append((answer.status, answer.url)))
            page.goto(address)
            page.get_by_role("link", name="exp", exact=True).click()
            page.wait_for_url(f"{address}/exp")
            page.keyboard.press("t")
            page.wait_for_url(f"{address}/exp/rollouts")
            expect(page.locator(".row .reward")).to_have_count(1)
            # A live event comes through the proxy.
            with tape.rollout(task_id="second") as rollout:
                first_turn(rollout.session())
                rollout.finish(reward=0.5)
            expect(page.locator(".row .reward")).to_have_count(2)
            page.goto(f"{address}/exp/rollout/{rollout.id}")
            expect(page.get_by_role("heading", name="second")).to_be_visible()
            raw = page.get_by_role("link", name="Raw JSON").get_attribute("href")
            assert raw == f"{BASE}/api/exp/rollouts/{rollout.id}/raw"
            page.get_by_role("link", name="Group").click()
            page.wait_for_url(f"{address}/exp/group/*")
            page.go_back()
            page.get_by_label("Search the messages").fill("hello")
            page.keyboard.press("Enter")
            page.wait_for_url(f"{address}/exp/rollouts?q=hello")
            page.get_by_role("link", name="all runs").click()
            expect(page.get_by_role("heading", name="Runs")).to_be_visible()
            assert {url for _, url in asked if not url.startswith((f"{address}/", "data:")) and url != address} == set()
            assert {(status, url) for status, url in asked if status >= 400} == set()
            assert any("/fonts/" in url for _, url in asked)


@pytest.mark.parametrize("removes_base", [True, False], ids=["removed", "left"])
async def test_the_key_moves_into_a_cookie_for_that_path_alone(tmp_path: Path, *, removes_base: bool) -> None:
    rolltape.open(tmp_path / "run", name="exp").close()
    async with (
        served([str(tmp_path / "run")], key="k", base_path=f"{BASE}/") as there,
        proxy(there.address.removesuffix(f"{BASE}/"), removes_base=removes_base) as address,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client,
    ):
        assert there.start.endswith(f"{BASE}/exp")
        async with client.get(f"{address}/exp?key=k", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (303, f"{BASE}/exp")
            assert f"Path={BASE}" in answer.headers["Set-Cookie"]
        async with client.get(f"{address}/api/runs") as answer:
            assert answer.status == 200
    async with (
        served([str(tmp_path / "run")], key="k", base_path=BASE) as there,
        aiohttp.ClientSession() as client,
        client.get(f"{there.address}api/runs") as answer,
    ):
        assert answer.status == 401


@pytest.mark.parametrize("given", ["x", "/api", "/api/x", "/a b", "/a?b", "/a/../b", "//host"])
async def test_a_path_that_the_page_cannot_lie_below_is_refused(tmp_path: Path, given: str) -> None:
    rolltape.open(tmp_path / "run", name="exp").close()
    with pytest.raises(ViewError, match="give a path such as"):
        async with served([str(tmp_path / "run")], base_path=given):
            pass
