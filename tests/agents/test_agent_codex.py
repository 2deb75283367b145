"""Codex, unmodified, over OpenAI's Responses API."""

from pathlib import Path

from agent_installs import codex
from agent_runs import Ran, Stage, assert_one_branch, cut_off, echoes, recorded, stage, thinks
from rolltape.records.fork import ForkCause
from rolltape.records.sample import Fate
from rolltape.records.turn import TurnFlag
from scripted_engine import Asked, Step

# Codex asks again after a 503, whatever its headers say: 4 times for each of 5 reconnections, unless it is told.
CONFIG = """
model = "{model}"
model_provider = "rolltape"
check_for_update_on_startup = false
web_search = "disabled"
[model_providers.rolltape]
name = "rolltape"
base_url = "{url}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 2
[analytics]
enabled = false
[otel]
exporter = "none"
metrics_exporter = "none"
[features]
plugins = false
apps = false
remote_plugin = false
"""
DONE = thinks("All is well.\n\n  Indeed.", "out.txt  has two lines.\n\n")
WRITE = ("exec_command", {"cmd": "printf 'a\\n5000\\n' > out.txt"})


async def run_codex(it: Stage, *arguments: str, model: str = "scripted", first: str = "") -> Ran:
    home = it.home / ".codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(first + CONFIG.format(model=model, url=it.session.openai_base_url))
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return await it.agent([codex(), "exec", *arguments, *options], {"CODEX_HOME": str(home)})


async def test_a_task_with_several_tool_calls_is_one_branch_that_trains_whole(tmp_path: Path) -> None:
    script = [
        thinks("I write it first.", "I will write the file.\n\n", WRITE),
        thinks("", "Now I look.", ("exec_command", {"cmd": "cat out.txt"}), ("exec_command", {"cmd": "wc -l out.txt"})),
        thinks("Not a whole number.", "", ("exec_command", {"cmd": "pwd", "yield_time_ms": 5000.0}), ("nothing", {})),
        DONE,
    ]
    async with stage(tmp_path, script) as it:
        ran = await run_codex(it, "Write a and 5000 into out.txt.")
        await it.session.finish(reward=1.0)
    assert (ran.code, ran.out.strip()) == (0, "out.txt  has two lines.")
    assert (it.work / "out.txt").read_text() == "a\n5000\n"
    assert echoes(assert_one_branch(it, turns=4)) == set()


async def test_a_custom_tool_and_a_resumed_conversation_go_on_in_the_same_branch(tmp_path: Path) -> None:
    patch = "*** Begin Patch\n*** Add File: out.txt\n+a\n+5000\n*** End Patch\n"
    script = [
        thinks("A patch.", "I patch.", ("apply_patch", {"input": patch}), ("exec_command", {"cmd": "cat out.txt"})),
        thinks("Badly.", 'I look.\n<tool_call>\n{"name": "exec_command", "arguments": {"cmd": \n</tool_call>'),
        thinks("Better.", "", ("exec_command", {"cmd": "cat out.txt"})),
        DONE,
    ]
    # Qwen3's own template drops earlier thinking where a new user message comes. Codex offers apply_patch to models
    # that it knows by name.
    async with stage(tmp_path, script, thinking_retention="all") as it:
        first = await run_codex(it, "Write a and 5000 into out.txt.", model="gpt-5.5")
        second = await run_codex(it, "resume", "--last", "Look at it.", model="gpt-5.5")
        await it.session.finish()
    assert (first.code, second.code) == (0, 0)
    assert "<tool_call>" in first.out  # a malformed call is delivered as the text that it is, and comes back as such
    assert (it.work / "out.txt").read_text() == "a\n5000\n"
    made = assert_one_branch(it, turns=4)
    assert echoes(made) == set()
    assert [TurnFlag.MALFORMED_CALL in turn.facts.flags for turn in made.rollout.turns] == [False, True, False, False]


async def test_each_compaction_is_called_so_and_all_that_was_sampled_trains(tmp_path: Path) -> None:
    def said(asked: Asked) -> str:
        if "<tools>" not in asked.prompt:  # Codex asks for the summary without tools
            return thinks("Briefly.", f"So far the numbers were counted, and this is summary {asked.number}.")
        if asked.number < 4:
            return thinks("On.", "I count.", ("exec_command", {"cmd": f"seq 1 {1500 + asked.number}"}))
        return DONE

    async with stage(tmp_path, said, engine={"conversation": lambda asked: None}) as it:
        ran = await run_codex(it, "Count.", first="model_auto_compact_token_limit = 5000\n")
        await it.session.finish()
    assert ran.code == 0
    made = recorded(it)
    assert [fork.cause for fork in made.forks] == [ForkCause.COMPACTION] * 4
    assert made.ledger.totals() == {Fate.TRAINED: made.ledger.sampled}


async def test_a_refusal_ends_it_within_seconds(tmp_path: Path) -> None:
    again = thinks("On and on.", "", ("exec_command", {"cmd": "true"}))
    async with stage(tmp_path, [again] * 9, spec={"max_turns": 2}) as it:
        over = await run_codex(it, "Go on for ever.")
        assert (over.code, it.refused(), it.engine.requests) == (1, 1, 2)
        assert "429" in over.err
        await it.session.finish()
        late = await run_codex(it, "Go on for ever.")
        assert (late.code, it.refused()) == (1, 1 + 3)
        assert "takes no more turns" in late.err
    assert_one_branch(it, turns=2)


async def test_a_dropped_connection_is_retried_and_gets_the_same_turn(tmp_path: Path) -> None:
    long = thinks("I write it first.", "I will write the file now, and then we shall see.", WRITE)
    script: list[str | Step] = [thinks("", "", ("exec_command", {"cmd": "ls"})), Step(long, token_delay_s=0.01), DONE]
    it, ran = await cut_off(tmp_path, script, lambda it: run_codex(it, "Write a and 5000 into out.txt."))
    assert ran.code == 0
    assert (it.work / "out.txt").read_text() == "a\n5000\n"
    assert_one_branch(it, turns=4)  # the second was cut off, and the third goes on from where it was
