"""What a gateway shows of itself: /metrics, /status, and `rolltape status`."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateways import CALCULATOR, Rig, rig, scripted, slowly, user
from rolltape.cli import run as rolltape_command
from rolltape.cli import screen
from scripted_engine import Mishap


async def _busy(it: Rig) -> None:
    """A bit of everything that is counted."""
    opened = await it.open(thinking=False, denied_tools=["search"])
    messages = [user("hello")]
    first = await it.ask(opened, messages)
    messages += [first.json["choices"][0]["message"], user("again")]
    await it.ask(opened, messages)
    await it.ask(opened, messages, retry=1)
    await it.ask(opened, messages, tools=[CALCULATOR])
    await it.ask(opened, [{"role": "system", "content": "Write a title of this session."}, user("hello")])
    await it.call("POST", "/v1/chat/completions", {})


def _script() -> list[str]:
    broken = '<tool_call>\n{"name": \n</tool_call>'
    return ["one", "two", broken, "A Title"]


async def test_metrics_are_prometheus_text_with_the_figures(run: Path) -> None:
    async with rig(run, _script()) as it:
        await _busy(it)
        answer = await it.call("GET", "/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        found = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(answer.raw.decode())
            for sample in family.samples
        }
    assert found["rolltape_turns_total", "chat", "stop"] == 4
    assert found["rolltape_sampled_tokens_total",] == sum(len(one.ids) for one in it.engine.said)
    assert found["rolltape_prompts_total", "", "bridged"] == 1
    assert found["rolltape_prompts_total", "first_turn", "rendered"] == 1
    assert found["rolltape_flagged_turns_total", "malformed_call"] == 1
    assert found["rolltape_deliveries_total", "delivered"] == 4
    assert found["rolltape_client_retries_total",] == 1
    assert found["rolltape_errors_total", "401"] == 1
    assert found["rolltape_added_seconds_count",] == 4
    assert found["rolltape_open_sessions",] == 1
    assert found["rolltape_in_flight",] == 0
    assert found["rolltape_engines_up",] == 1


async def test_status_counts_what_happened(run: Path) -> None:
    async with rig(run, _script()) as it:
        await _busy(it)
        said = (await it.call("GET", "/status")).json
    counts = said["counts"]
    assert (said["sessions"], said["in_flight"], said["paused"], said["draining"]) == (1, 0, False, False)
    assert (counts["turns"], counts["auxiliary"], counts["malformed_call"], counts["retries"]) == (4, 1, 1, 1)
    assert (counts["bridged"], counts["rendered"], counts["errors"]) == (1, 3, 1)
    assert said["unbridged"]["first_turn"] == 1
    assert said["version"] == "v0"
    assert said["rates"]["sampled_tokens_per_s"] > 0
    assert said["engines"][0]["up"] is True


async def test_a_turn_in_flight_and_a_pause_show(run: Path) -> None:
    async with rig(run, slowly("a b c d e f", 0.05)) as it:
        opened = await it.open()
        asking = it.asking(opened, "hello")
        await it.requested(1)
        assert it.gateway.status()["in_flight"] == 1
        await it.gateway.pause()
        assert it.gateway.status()["paused"] is True
        await it.gateway.resume()
        await asking
        assert it.gateway.status()["counts"]["interrupted"] == 1


@pytest.mark.parametrize("columns", [60, 80, 200])
async def test_the_command_shows_the_figures_within_the_terminal(
    run: Path, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "terminal_width", lambda: columns)
    engine = scripted([*_script(), "last"])
    engine.mishaps |= dict.fromkeys(range(4, 7), Mishap.TRUNCATED)
    async with rig(run, engine, keep_admin_key=True) as it:
        await _busy(it)
        await it.ask((await it.call("POST", "/sessions", {"task_id": "u"})).json, "fails")
        code = await asyncio.to_thread(rolltape_command, ["status", it.gateway.url])
    shown = capsys.readouterr().out
    assert code == 0
    assert all(len(line) <= columns for line in shown.splitlines()), shown
    lines = {line.split("  ")[0].strip(): line for line in shown.splitlines() if line.strip()}
    assert lines["turns"].split()[1] == "5"
    assert lines["engine errors"].split()[2] == "1"
    assert "20.0%" in lines["prompts bridged"]
    assert any(line.startswith("run run: running, weights v0") for line in shown.splitlines())


async def test_the_command_says_what_is_wrong_in_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with rig(run, admin_key="k") as it:
        for arguments, says in (
            (["status", it.gateway.url], "requires its admin key; give it with --admin-key"),
            (
                ["status", it.gateway.url, "--admin-key", "wrong"],
                "refuses the admin key that was given; give the one of",
            ),
            (["status", it.engine.url], "the server there is not a gateway; /status answered 404"),
            (["status", "http://127.0.0.1:9"], "no gateway answers"),
            (["status", "nowhere"], "no gateway of yours records there"),
        ):
            assert await asyncio.to_thread(rolltape_command, arguments) == 2
            said = capsys.readouterr().err
            assert says in said
            assert len(said.splitlines()) == 1
        assert await asyncio.to_thread(rolltape_command, ["status", it.gateway.url, "--admin-key", "k"]) == 0
