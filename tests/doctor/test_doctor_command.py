"""The command: what it prints, for people and for scripts, and its exit codes."""

import sys
from pathlib import Path

import pytest

from commands import Cli, rows
from doctor.test_doctor_models import OTHER_TEMPLATE, folder
from rolltape.tiny import shipped_model

__all__ = ["folder"]


def test_a_model_folder_is_printed_in_aligned_lines(cli: Cli) -> None:
    result = cli("doctor", "--model", shipped_model())
    assert (result.code, result.err) == (0, "")
    heading, *lines, blank, last = result.out.splitlines()
    assert (heading, blank, last) == ("model", "", "1 note: this stack trains what it sampled")
    assert {line.index("  ", 2) <= 9 for line in lines} == {True}
    assert lines[0].startswith("  ok       template       renderer qwen3")
    assert lines[-1].startswith(" " * 26 + "→ --thinking-retention all")


def test_the_exit_code_is_by_the_worst_verdict(cli: Cli, folder: Path) -> None:
    warned = cli("doctor", "--agent", f"command:{sys.executable} {Path(__file__).with_name('toy_agent.py')} shouts")
    assert warned.code == 6
    assert warned.out.splitlines()[-1].endswith("this stack trains what it sampled, at a cost")
    (folder / "chat_template.jinja").write_text(OTHER_TEMPLATE)
    broken = cli("doctor", "--model", folder)
    assert broken.code == 1
    assert broken.out.splitlines()[-1].endswith("this stack does not train what it sampled")


def test_json_has_one_object_per_check_with_its_figures(cli: Cli) -> None:
    result = cli("doctor", "--model", shipped_model(), "--json")
    by_check = {row["check"]: row for row in rows(result)}
    assert by_check["template"] == {
        "part": "model",
        "check": "template",
        "verdict": "ok",
        "measured": "renderer qwen3 gives the ids of the folder's template on 8 conversations",
        "advice": None,
        "figures": {},
    }
    assert by_check["bridging"]["figures"]["bridged"][0] == "tool result"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to check: give --engine, --model, --agent, or --gateway"),
        (["--engine", "sglang:http://127.0.0.1:9"], "--engine: give --model too"),
        (["--engine", "nothing"], "'nothing' names no engine"),
        (["--agent", "nobody"], "there is no agent 'nobody'"),
        (["--gateway", "127.0.0.1:9"], "--gateway 127.0.0.1:9: not a URL"),
        (
            ["--gateway", "http://127.0.0.1:9", "--agent", "chat"],
            "--gateway: a gateway is checked alone; leave out --agent",
        ),
        (["--gateway", "http://127.0.0.1:9", "--renderer", "qwen3"], "checked alone; leave out --renderer"),
        (["--engine", "tiny", "--gateway-model", "m"], "--gateway-model needs --gateway"),
    ],
)
def test_what_cannot_be_checked_is_wrong_usage(cli: Cli, arguments: list[str], said: str) -> None:
    result = cli("doctor", *arguments)
    assert result.code == 2
    assert said in result.err


def test_a_gateway_that_is_not_there_is_a_fault(cli: Cli) -> None:
    result = cli("doctor", "--gateway", "http://127.0.0.1:9", "--key", "k")
    assert result.code == 1
    assert result.out.splitlines()[-1] == "1 fault: agents cannot work with this gateway"
