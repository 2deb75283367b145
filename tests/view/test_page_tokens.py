"""The view of tokens: parts of characters, what else was likely, two measures at once, the trainer's mask."""

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

import rolltape
from browser import browser_page
from byte_tokens import LEFT_OUT, PROBABILITIES, PROMPT, REPLY, record_bytes
from taped import first_turn, next_turn
from trained_runs import samples_of
from view_columns import unpacked
from viewed import VIEWER, page_over, serious_findings
from viewing import answers_for

_FACE = len(PROMPT) + REPLY.encode().index("🫠".encode())  # the first of its four tokens


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_bytes(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def page(run: Path) -> Iterator[Page]:
    first = samples_of(run)[0]
    with page_over(run) as address, browser_page(width=1400, height=900) as page:
        page.goto(f"{address}/exp/rollout/{first.rollout}/tokens/0/{_FACE + 1}")
        page.locator(".t.chosen").wait_for()
        yield page


def test_a_token_says_which_bytes_of_which_character_it_has_and_what_else_was_likely(page: Page) -> None:
    shown = [page.locator(f"[data-token='{_FACE + at}']").inner_text() for at in range(4)]
    assert shown == ["⋯", "⋯", "⋯", "🫠"]
    about = page.locator("aside")
    expect(about).to_contain_text("byte 2 of 4 of 🫠")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(about).to_contain_text("byte 4 of 4 of 🫠")
    likely = page.get_by_role("list", name="Most likely tokens here").get_by_role("listitem")
    expect(likely).to_have_count(3)
    assert [re.sub(r"\s+", " ", one) for one in likely.all_inner_texts()] == ["x 50.0%", "⟨A0⟩ 25.0%", "y 20.0%"]
    expect(likely.nth(1)).to_have_attribute("aria-current", "true")
    expect(about).to_contain_text("sampled: number 2")
    page.get_by_role("button", name="Entropy, at least").click()
    entropy = -sum(p * math.log(p) for p in (*PROBABILITIES, 1 - sum(PROBABILITIES)))
    expect(page.locator("aside li a").first).to_contain_text(f"{entropy:.3f}")


def test_a_rollout_says_how_it_was_sampled_and_when_and_a_sample_what_its_logprobs_are_of(tmp_path: Path) -> None:
    with rolltape.open(tmp_path / "exp", name="exp") as tape, tape.rollout(task_id="t") as rollout:
        session = rollout.session()
        fields: list[dict[str, Any]] = [
            {"sampling": {"temperature": 0.7, "seed": at}, "logprob_kind": "after_temperature", "ended_at": 50.0 * at}
            for at in (1, 2)
        ]
        next_turn(session, first_turn(session, **fields[0], started_at=0.5), **fields[1])
        rollout.finish(reward=1.0)
    with page_over(tmp_path / "exp") as address, browser_page(width=1400, height=900) as page:
        page.goto(f"{address}/exp/rollout/{rollout.id}")
        expect(page.locator("dt", has_text="sampling").locator("+ dd")).to_have_text("temperature 0.7")
        expect(page.locator("dt", has_text="took").locator("+ dd")).to_have_text("1 min 40 s")
        page.goto(f"{address}/exp/rollout/{rollout.id}/tokens/0")
        expect(page.locator("main header")).to_contain_text("logprobs after temperature")


def test_two_measures_at_once_and_where_the_trainers_mask_differs_from_the_tape(page: Page) -> None:
    page.get_by_role("button", name="Trainer's mask").click()
    expect(page.locator("aside section li")).to_have_count(1)
    page.keyboard.press("w")
    expect(page.locator(".t.chosen")).to_have_attribute("data-token", str(LEFT_OUT))
    expect(page.locator("aside")).to_contain_text("left it out: disagrees with the tape")
    expect(page.locator(".t.f-less")).to_have_count(1)
    expect(page.locator(".t.f-trained")).to_have_count(len(REPLY.encode()) - 1)
    page.get_by_label("Second measure").select_option("logprob")
    expect(page).to_have_url(re.compile(r"by=trainer_mask&and=logprob$"))
    expect(page.locator(".t.u-h3")).to_have_count(len(REPLY.encode()))  # a logprob of ln 0.25 is the third step
    assert page.get_by_label("Place in the sample").bounding_box()["width"] >= 40  # type: ignore[index]
    page.reload()
    expect(page.locator(".t.f-less.u-h3")).to_have_count(1)
    expect(page.get_by_label("What the bars below tokens mean")).to_be_visible()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert serious_findings(page) == []


def test_the_most_likely_tokens_of_a_sample_and_of_a_turn_are_those_that_the_engine_gave(run: Path) -> None:
    sample = samples_of(run)[0]
    with answers_for(run) as answers:
        row = answers.row(sample.rollout, None)
        turn = sample.spans[-1].turn
        for packed in (answers.shown(row).tokens(0, None), answers.shown(row).turn_tokens(turn)):
            header, columns = unpacked(packed)
            assert header["top"] == 3
            ids = columns["top_ids"].reshape(-1, 3)
            logprobs = columns["top_logprobs"].reshape(-1, 3)
            assert (ids[: len(PROMPT)] == -1).all()
            assert ids[len(PROMPT) :, 1].tolist() == sample.ids[len(PROMPT) :].tolist()
            np.testing.assert_array_equal(
                logprobs[len(PROMPT) :], np.log([PROBABILITIES] * (len(ids) - len(PROMPT))).astype(np.float32)
            )


def _oklab(color: str) -> tuple[float, float, float]:
    """A color in a space where distances are about as large as they look."""
    r, g, b = (_linear(int(color[at : at + 2], 16) / 255) for at in (1, 3, 5))
    long, middle, small = (
        sum(part * value for part, value in zip(parts, (r, g, b), strict=True)) ** (1 / 3)
        for parts in (
            (0.4122214708, 0.5363325363, 0.0514459929),
            (0.2119034982, 0.6806995451, 0.1073969566),
            (0.0883024619, 0.2817188376, 0.6299787005),
        )
    )
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * small,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * small,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * small,
    )


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def _luminance(color: str) -> float:
    r, g, b = (_linear(int(color[at : at + 2], 16) / 255) for at in (1, 3, 5))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("scale", ["heat", "below", "above"])
def test_neighboring_steps_of_a_scale_can_be_told_apart_and_text_on_them_read(scale: str, scheme: str) -> None:
    styles = (VIEWER / "src" / "styles" / "theme.css").read_text(encoding="utf-8")
    colors = {
        name: pair[scheme == "dark"] for name, *pair in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", styles)
    }
    steps = [colors["surface"], *(colors[name] for name in sorted(colors) if name.startswith(f"{scale}-"))]
    assert len(steps) == (7 if scale == "heat" else 4)
    assert min(math.dist(_oklab(one), _oklab(other)) for one, other in pairwise(steps)) > 0.05
    for step in steps:
        dark, light = sorted((_luminance(step), _luminance(colors["ink"])))
        assert (light + 0.05) / (dark + 0.05) >= 4.5
