"""Make the pictures of the page in docs/images from a run: screenshots, and a walk from the run to a token.

    python viewer/pictures.py runs/demo

It needs the tools of development and Debian's Chromium (`make test` installs both). The run should have several steps,
groups of at least two attempts, and a trainer's token records, as the run of `rolltape demo` has.
"""

import asyncio
import contextlib
import io
import json
import os
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Locator, Page, sync_playwright

from rolltape.view.serve import served

IMAGES = Path(__file__).parents[1] / "docs" / "images"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
WIDTH, HEIGHT, SCALE = 1120, 700, 2
MOVE_FRAMES, MOVE_MS, PRESS_MS, LOOK_MS = 6, 50, 200, 1900
QUALITY = 70
SHOT_WIDTHS = {"run": 1320, "group": 1320, "rollout": 1440, "tokens": 1320}

# A caption and a pointer, which a screenshot lacks. A script styles them, since the page admits no inline style.
OVERLAY = """() => {
  const add = (id, rules) => {
    const element = document.createElement("div");
    element.id = id;
    element.ariaHidden = "true";
    Object.assign(element.style, { position: "fixed", zIndex: 99, ...rules });
    document.body.append(element);
  };
  add("walk-caption", {
    left: "50%", bottom: "20px", transform: "translateX(-50%)", padding: "10px 20px", borderRadius: "22px",
    background: "#1c1b18", color: "#faf9f6", font: "500 16px Geist, sans-serif", whiteSpace: "nowrap",
    boxShadow: "0 6px 24px rgb(0 0 0 / 25%)",
  });
  add("walk-pointer", {
    left: "0", top: "0", width: "22px", height: "22px", borderRadius: "50%", background: "rgb(194 90 18 / 35%)",
    border: "2px solid #c25a12", pointerEvents: "none",
  });
}"""


@contextlib.contextmanager
def page_over(run: Path) -> Iterator[str]:
    """The address of a run on a server that runs in a thread, since Playwright's calls block."""
    loop, ready, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    addresses: list[str] = []

    async def serve() -> None:
        async with served([str(run)]) as there:
            addresses.append(there.start)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        ready.wait(60)
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


class Walk:
    """Records what a person who clicks through the page sees."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._frames: list[tuple[Image.Image, int]] = []
        self._at = (WIDTH * 0.55, HEIGHT * 0.62)
        page.evaluate(OVERLAY)
        self._point(*self._at)

    def look(self, caption: str, ms: int = LOOK_MS) -> None:
        """Show what is there, with a caption."""
        self._page.evaluate("text => (document.getElementById('walk-caption').textContent = text)", caption)
        self._page.wait_for_timeout(250)
        self._take(ms)

    def click(self, target: Locator, at: tuple[float, float] | None = None) -> None:
        """Move the pointer to a place, the middle of the element unless another share of it is given, and press."""
        box = target.bounding_box()
        assert box is not None
        share = at or (0.5, 0.5)
        end = (box["x"] + share[0] * box["width"], box["y"] + share[1] * box["height"])
        start = self._at
        for frame in range(1, MOVE_FRAMES + 1):
            eased = 1 - (1 - frame / MOVE_FRAMES) ** 3
            self._point(start[0] + eased * (end[0] - start[0]), start[1] + eased * (end[1] - start[1]))
            self._take(MOVE_MS)
        self._point(*end, pressed=True)
        self._page.mouse.move(*end)
        self._take(PRESS_MS)
        self._page.mouse.click(*end)
        self._page.mouse.move(2, HEIGHT - 2)
        self._point(*end)

    def save(self, path: Path) -> None:
        images, durations = zip(*self._frames, strict=True)
        images[0].save(
            path, save_all=True, append_images=images[1:], duration=durations, loop=0, quality=QUALITY, method=4,
            minimize_size=True, allow_mixed=True,
        )  # fmt: skip
        print(f"{path}: {len(images)} frames, {sum(durations) / 1000:.1f} s, {path.stat().st_size:,} bytes")

    def _point(self, x: float, y: float, *, pressed: bool = False) -> None:
        self._at = (x, y)
        self._page.evaluate(
            "([x, y, size]) => (document.getElementById('walk-pointer').style.transform ="
            " `translate(${x - 13}px, ${y - 13}px) scale(${size})`)",
            [x, y, 0.7 if pressed else 1],
        )

    def _take(self, ms: int) -> None:
        shot = Image.open(io.BytesIO(self._page.screenshot())).convert("RGB")
        self._frames.append((shot, ms))


def record_walk(page: Page, address: str, facts: dict[str, Any]) -> None:
    page.goto(address)
    page.locator(".figures").wait_for()
    chart = page.get_by_role("figure", name="Mean reward by step").locator(".plot")
    chart.wait_for()
    page.wait_for_timeout(800)
    walk = Walk(page)
    steps = len(facts["steps"])
    walk.look(f"One run: the reward over {steps} steps", 2300)
    walk.click(chart, at=(0.96, 0.5))
    page.wait_for_function(f"location.search === '?step={facts['last_step']}'")
    page.get_by_role("list", name="Hardest tasks").wait_for()
    page.get_by_role("list", name="Hardest tasks").evaluate("list => list.scrollIntoView({ block: 'center' })")
    page.wait_for_timeout(600)
    walk.look("Its last step: the tasks, hardest first")
    tasks = page.get_by_role("list", name="Hardest tasks").get_by_role("link")
    walk.click(tasks.filter(has_text=facts["task"]).first, at=(0.12, 0.5))
    page.locator(".attempt").first.wait_for()
    walk.look("One task: its attempts side by side")
    walk.click(page.locator(f"a[href*='/rollout/{facts['rollout']}']").first)
    page.locator(".talk").wait_for()
    walk.look("One rollout: turns, transcript, rewards")
    walk.click(page.get_by_role("link", name="Tokens", exact=True))
    page.locator(".t").first.wait_for()
    walk.look("Its tokens, by the engine's logprobs")
    walk.click(page.get_by_role("button", name="Mismatch KL", exact=True))
    page.wait_for_timeout(300)
    page.keyboard.press("w")
    page.locator(".t.chosen").wait_for()
    walk.look("One token: where trainer and engine disagree most", 2800)
    walk.save(IMAGES / "walk.webp")


def take_screenshots(page: Page, address: str, facts: dict[str, Any]) -> None:
    rollout = f"{address}/rollout/{facts['rollout']}"
    places = {
        "run": (address, ".figures"),
        "group": (f"{address}/group/{facts['group']}", ".attempt"),
        "rollout": (rollout, ".talk"),
        "tokens": (f"{rollout}/tokens/0?by=mismatch_kl&and=logprob", ".t"),
    }
    for name, (place, shown) in places.items():
        page.set_viewport_size({"width": SHOT_WIDTHS[name], "height": 860})
        page.goto(place)
        page.locator(shown).first.wait_for()
        page.wait_for_timeout(1000)
        if name == "tokens":
            page.keyboard.press("w")
            page.wait_for_timeout(300)
        path = IMAGES / f"{name}.png"
        shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        shot.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
        print(f"{path}: {path.stat().st_size:,} bytes")


def ask(address: str, path: str) -> Any:
    with urllib.request.urlopen(address + path) as answer:
        return json.load(answer)


def choose(address: str) -> dict[str, Any]:
    """The last step, the task with the most turns of those whose attempts differ, and the longest attempt at it."""
    host, _, name = address.rpartition("/")
    overview = ask(host, f"/api/{name}/overview")
    steps = [row["step"] for row in overview["by_step"]]
    tasks = ask(host, f"/api/{name}/tasks?step={steps[-1]}&sort=-turns&limit=500")["rows"]
    task = next(one for one in tasks if one["spread"])
    rows = ask(host, f"/api/{name}/rollouts?group={task['group']}&sort=-turns&limit=1")["rows"]
    chosen = {"task": task["task"], "group": task["group"], "rollout": rows[0]["id"]}
    return {"steps": steps, "last_step": steps[-1], **chosen}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with page_over(Path(sys.argv[1])) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE)
        facts = choose(address)
        record_walk(page, address, facts)
        take_screenshots(page, address, facts)
        browser.close()


if __name__ == "__main__":
    main()
