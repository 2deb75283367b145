"""As a new user: from a run's page alone to the worst rollout, why it failed, and the token of most mismatch."""

from collections.abc import Iterator

import pytest
import torch
from playwright.sync_api import Page, expect

import rolltape
from rolltape.records.policy import Advantage
from rolltape.tokens import Dppo
from taped import first_turn, next_turn
from token_batches import exported, packed, sequence_columns
from viewed import ask, page_over

FAR = 3.0  # how far the trainer is off at one token, in nats
PLACE = 7  # a token of the second reply


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Four attempts at a task; a trainer with credit of its own looked twice at each sample."""
    run = tmp_path_factory.mktemp("walk") / "exp"
    with rolltape.open(run, name="exp") as tape:
        for attempt in range(4):
            with tape.rollout(task_id="add", attempt=attempt, step=7, source="game") as rollout:
                session = rollout.session()
                next_turn(session, first_turn(session), attempt)
                rollout.finish(reward=[1.0, 0.5, 0.0, 1.0][attempt], reward_terms={"correct": 0.0})
    credit = rolltape.Credit(advantage=Advantage.NORMALIZED)
    rollouts = rolltape.read(run).rollouts()
    samples = [sample for rollout in rollouts for sample in rolltape.linearize(rollout, credit=credit).samples()]

    def seen(second: bool) -> list[dict[str, torch.Tensor]]:
        sequences = []
        for seed, sample in enumerate(samples):
            columns = sequence_columns(len(sample.ids), seed, sample.trained_mask.tolist())
            columns |= {
                "ids": torch.tensor(sample.ids.tolist()),
                "trainer_logprobs": columns["inference_logprobs"].clone(),
            }
            if second and seed == 1:
                columns["trainer_logprobs"][PLACE] += FAR
            sequences.append(columns)
        return sequences

    ids = [sample.id for sample in samples]
    exported(run, packed(seen(False), sample_ids=ids), packed(seen(True), sample_ids=ids), loss=Dppo())
    with page_over(run) as address:
        yield address


@pytest.fixture
def page(page: Page, address: str) -> Page:
    page.goto(f"{address}/exp")
    page.locator(".figures").wait_for()
    return page


def test_the_worst_rollout_and_why_are_two_clicks_away(page: Page, address: str) -> None:
    page.get_by_role("link", name="worst first").click()
    page.locator(".row:has(.reward span:text-is('0'))").first.click()
    page.locator("[data-turn]").first.wait_for()
    expect(page.locator(".title .reward")).to_have_text("0")
    expect(page.get_by_label("Facts")).to_contain_text("Reward terms")
    page.keyboard.press("j")  # the next worst
    expect(page.locator(".title .reward")).to_have_text("0.5")


def test_what_a_trainer_exported_of_a_single_step_is_told_in_words(page: Page, address: str) -> None:
    told = ask(address, "/api/exp/overview")["by_step"][0]["trainer"]
    panel = page.locator(".panel", has=page.get_by_role("heading", name="What the trainer exported"))
    expect(panel).to_contain_text("of step 7")
    expect(panel).to_contain_text(f"Entropy mean of trained tokens, nats {told['entropy']:.3g}")


def test_a_task_leads_to_its_attempts_side_by_side(page: Page) -> None:
    page.get_by_role("list", name="Hardest tasks").get_by_role("link").first.click()
    expect(page.locator(".attempt .reward")).to_have_text(["1", "1", "0.5", "0"])


def test_the_token_with_the_largest_mismatch_is_one_click_away(page: Page, address: str) -> None:
    at = ask(address, "/api/exp/overview")["by_step"][0]["trainer"]["max_mismatch_at"]
    page.get_by_role("list", name="Tokens with the largest mismatch").get_by_role("link").click()
    chosen = page.locator(".t.chosen")
    expect(chosen).to_have_attribute("data-token", str(PLACE))
    assert at["rollout"] in page.url
    expect(page.get_by_role("button", name="Mismatch KL", exact=True)).to_have_attribute("aria-pressed", "true")
    # exp(3) - 3 - 1: what the trainer saw in its second look, not in its first.
    expect(page.locator(".inspector")).to_contain_text("16.09")
    looks = page.get_by_label("Which of the trainer's passes over the sample")
    expect(looks.locator("option")).to_have_text(["step 7, pass 1 of 2", "step 7, pass 2 of 2"])
    looks.select_option(index=0)
    expect(page.locator(".inspector")).not_to_contain_text("16.09")
    page.reload()
    expect(chosen).to_have_attribute("data-token", str(PLACE))
    page.go_back()
    page.locator(".figures").wait_for()
