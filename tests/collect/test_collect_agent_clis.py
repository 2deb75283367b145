"""Claude Code and Codex, unmodified, launched on an assignment."""

from pathlib import Path
from typing import Any

import pytest

from agent_assignments import ROLLOUT, ScriptedEpisode, assigned, connected
from agent_installs import claude_code, codex
from agent_runs import Stage, assert_one_branch, stage, thinks
from rolltape.collect.agents import AgentOutcome, agent_named, discard
from rolltape.collect.environments.protocol import AGENT
from rolltape.collect.sandboxes.running import attempt_processes
from rolltape.records.rollout import StopReason
from scripted_engine import Step

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Put two lines into out.txt."}]
DONE = thinks("All is well.", "out.txt has two lines.")
CLAUDE = ("claude-code", claude_code, ("Write", {"file_path": "out.txt", "content": "a\n5000\n"}), "Bash")
CODEX = ("codex", codex, ("exec_command", {"cmd": "printf 'a\\n5000\\n' > out.txt"}), "exec_command")
# What they say to anybody but loopback goes nowhere.
NOWHERE = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}


@pytest.fixture(autouse=True)
def _no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from rolltape.collect.sandboxes import running

    passed_on = running.inherited_variables
    monkeypatch.setattr(running, "inherited_variables", lambda: {**passed_on(), **NOWHERE})


async def run(it: Stage, name: str, program: Path, **fields: Any) -> AgentOutcome:
    episode = ScriptedEpisode(messages=MESSAGES, files={"in.txt": "given\n"})
    connections = {AGENT: connected(it.session)}
    return await agent_named(f"{name}:{program}").run(
        assigned(episode, it.run.parent, connections=connections, **{"timeout_s": 90.0, **fields})
    )


@pytest.mark.parametrize(("name", "installed", "write", "look"), [CLAUDE, CODEX], ids=["claude-code", "codex"])
async def test_it_does_a_small_task_in_its_own_folder(
    tmp_path: Path, name: str, installed: Any, write: Any, look: str
) -> None:
    argument = "command" if look == "Bash" else "cmd"
    script = [thinks("I write it.", "", write), thinks("I look.", "", (look, {argument: "cat in.txt out.txt"})), DONE]
    async with stage(tmp_path, script) as it:
        outcome = await run(it, name, installed())
        await it.session.finish(reward=1.0)
    ended = outcome.ended[AGENT]
    assert (outcome.exit_code, outcome.broken, ended.stop_reason) == (0, None, StopReason.COMPLETED)
    assert ended.text.strip() == "out.txt has two lines."
    assert ended.folder is not None
    assert (ended.folder / "out.txt").read_text() == "a\n5000\n"
    made = assert_one_branch(it, turns=3)
    assert {turn.facts.extra["model_asked"] for turn in made.rollout.turns} == {"the-model"}
    prompt = it.engine.said[0].asked.prompt
    assert "Be brief.\n\nPut two lines into out.txt." in prompt
    assert "given" in it.engine.said[2].asked.prompt
    await discard(outcome)
    assert not ended.folder.exists()


@pytest.mark.parametrize(("name", "installed", "write", "look"), [CLAUDE, CODEX], ids=["claude-code", "codex"])
async def test_a_time_out_leaves_nothing_of_it(
    tmp_path: Path, name: str, installed: Any, write: Any, look: str
) -> None:
    argument = "command" if look == "Bash" else "cmd"
    waits = thinks("I wait.", "", (look, {argument: "setsid sleep 300 & sleep 300"}))
    async with stage(tmp_path, [waits, Step(DONE, token_delay_s=1.0)]) as it:
        outcome = await run(it, name, installed(), timeout_s=12.0)
        await it.session.finish()
    assert outcome.timed_out
    assert outcome.ended[AGENT].stop_reason is StopReason.TIMEOUT
    assert it.engine.requests >= 1
    assert attempt_processes(ROLLOUT) == []


async def test_lists_of_tools_reach_claude_code(tmp_path: Path) -> None:
    async with stage(tmp_path, [DONE, DONE]) as it:
        outcome = await run(it, "claude-code", claude_code(), allowed_tools=("Bash", "Read"), denied_tools=("Read",))
        await it.session.finish()
    assert outcome.exit_code == 0
    prompt = it.engine.said[0].asked.prompt
    assert '"name": "Bash"' in prompt
    assert not [name for name in ("Read", "Write", "Edit", "Agent") if f'"name": "{name}"' in prompt]
