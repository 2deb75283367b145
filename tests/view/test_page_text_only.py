"""A run whose replies came as text alone: the page states no tokens that nobody recorded."""

import json
from pathlib import Path

from playwright.sync_api import expect

from browser import browser_page
from importing import imported
from viewed import page_over


def test_what_was_imported_without_ids_has_no_token_counts(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Good day."}]
    source = tmp_path / "talks.jsonl"
    source.write_text(json.dumps({"messages": talk}) + "\n")
    imported("messages", source, tmp_path / "exp")
    with page_over(tmp_path / "exp") as address, browser_page(width=1400, height=900) as page:
        page.goto(f"{address}/exp")
        expect(page.locator(".figures div", has_text="Sampled tokens").locator("dd")).to_have_text("–")
        expect(page.get_by_text("No sampled token ids are recorded.")).to_be_visible()
        page.get_by_role("link", name="Rollouts", exact=True).click()
        page.get_by_role("table", name="Rollouts").locator(".row a").first.click()
        expect(page.locator(".facts").first).to_contain_text("text only")
        expect(page.locator("[data-turn]").first).to_contain_text("Good day.")
