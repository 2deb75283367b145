"""An older Codex, unmodified, over OpenAI's Chat Completions."""

from pathlib import Path

from agent_installs import CODEX_CHAT, codex
from agent_runs import Ran, Stage, assert_one_branch, cut_off, echoes, stage, thinks
from scripted_engine import Step

# It knows no refusal that is final: each is asked again 4 times for each of 5 reconnections, unless it is told.
CONFIG = """
model = "scripted"
model_provider = "rolltape"
[model_providers.rolltape]
name = "rolltape"
base_url = "{url}"
wire_api = "chat"
request_max_retries = 0
stream_max_retries = 2
"""
DONE = thinks("All is well.\n\n  Indeed.", "out.txt  has two lines.\n\n")
WRITE = ("shell", {"command": ["bash", "-c", "printf 'a\\n5000\\n' > out.txt"]})


async def run_codex(it: Stage, prompt: str) -> Ran:
    home = it.home / ".codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(CONFIG.format(url=it.session.openai_base_url))
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return await it.agent([codex(CODEX_CHAT), "exec", *options, prompt], {"CODEX_HOME": str(home)})


async def test_a_task_with_several_tool_calls_is_one_branch_that_trains_whole(tmp_path: Path) -> None:
    look = ("shell", {"command": ["cat", "out.txt"], "timeout_ms": 5000.0})
    script = [
        thinks("I write it first.", "I will write the file.\n\n", WRITE),
        thinks("Alone.", "", look),
        thinks("Twice.", "I look twice.", look, ("shell", {"command": ["wc", "-l", "out.txt"]})),
        thinks("", "I look twice.", look),
        DONE,
    ]
    async with stage(tmp_path, script) as it:
        ran = await run_codex(it, "Write a and 5000 into out.txt.")
        await it.session.finish(reward=1.0)
    assert ran.code == 0
    assert ran.out.strip().endswith("out.txt  has two lines.")
    assert (it.work / "out.txt").read_text() == "a\n5000\n"
    made = assert_one_branch(it, turns=5)
    # Of two calls it runs and sends back the first alone; the model still sees both as it made them.
    assert echoes(made) == {"reasoning_dropped", "text_apart", "later_calls_dropped"}


async def test_a_refusal_ends_it_within_seconds(tmp_path: Path) -> None:
    again = thinks("On and on.", "", ("shell", {"command": ["true"]}))
    async with stage(tmp_path, [again] * 9, spec={"max_turns": 2}) as it:
        over = await run_codex(it, "Go on for ever.")
        assert (it.refused(), it.engine.requests) == (3, 2)
        assert "429" in over.out
        await it.session.finish()
        late = await run_codex(it, "Go on for ever.")
        assert it.refused() == 3 + 3
        assert "503" in late.out
    assert_one_branch(it, turns=2)


async def test_a_dropped_connection_is_retried_and_gets_the_same_turn(tmp_path: Path) -> None:
    long = thinks("I write it first.", "I will write the file now, and then we shall see.", WRITE)
    script: list[str | Step] = [thinks("", "", ("shell", {"command": ["ls"]})), Step(long, token_delay_s=0.01), DONE]
    it, ran = await cut_off(tmp_path, script, lambda it: run_codex(it, "Write a and 5000 into out.txt."))
    assert ran.code == 0
    assert (it.work / "out.txt").read_text() == "a\n5000\n"
    assert_one_branch(it, turns=4)  # the second was cut off, and the third goes on from where it was
