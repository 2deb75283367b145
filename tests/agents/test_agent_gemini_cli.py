"""gemini-cli, unmodified, over Google's Gemini API."""

import json
from pathlib import Path

from agent_installs import gemini_cli
from agent_runs import Ran, Stage, assert_one_branch, echoes, stage, thinks
from rolltape.records.turn import TurnFlag
from scripted_engine import Json

SETTINGS = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
}


async def run_gemini(it: Stage, prompt: str) -> Ran:
    (it.home / ".gemini").mkdir(exist_ok=True)
    (it.home / ".gemini" / "settings.json").write_text(json.dumps(SETTINGS))
    env = {
        "GOOGLE_GEMINI_BASE_URL": it.session.google_base_url,
        "GEMINI_API_KEY": "none",
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    }
    return await it.agent([gemini_cli(), "-m", "scripted", "--yolo", "-p", prompt], env)


def shell(command: str) -> tuple[str, Json]:
    return "run_shell_command", {"command": command}


async def test_a_task_with_several_tool_calls_is_one_branch_that_trains_whole(tmp_path: Path) -> None:
    script = [
        thinks("I write it first.", "I will write the file.\n\n", shell("printf 'a\\n5000\\n' > out.txt")),
        thinks("", "Now I look.", ("read_file", {"file_path": "out.txt"}), shell("wc -l out.txt")),
        thinks("Not there.", "", ("nothing", {})),
        thinks(
            "All is well.\n\n  Indeed.", 'So.\n<tool_call>\n{"name": "run_shell_command", "arguments": {\n</tool_call>'
        ),
    ]
    async with stage(tmp_path, script) as it:
        ran = await run_gemini(it, "Write a and 5000 into out.txt.")
        await it.session.finish(reward=1.0)
    assert ran.code == 0
    assert "<tool_call>" in ran.out  # a malformed call is delivered as the text that it is
    assert (it.work / "out.txt").read_text() == "a\n5000\n"
    made = assert_one_branch(it, turns=4)
    assert echoes(made) == {"reasoning_dropped"}
    assert TurnFlag.MALFORMED_CALL in made.rollout.turns[-1].facts.flags


async def test_a_refusal_ends_it_at_once(tmp_path: Path) -> None:
    again = thinks("On and on.", "", shell("true"))
    async with stage(tmp_path, [again] * 9, spec={"max_turns": 2}) as it:
        over = await run_gemini(it, "Go on for ever.")
        assert (over.code, it.refused(), it.engine.requests) == (1, 3, 2)
        assert "has reached its maximum of turns (2)" in over.err
        await it.session.finish()
    assert_one_branch(it, turns=2)
