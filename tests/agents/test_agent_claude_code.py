"""Claude Code, unmodified, over Anthropic's Messages API."""

from pathlib import Path

from agent_installs import claude_code
from agent_runs import Ran, Stage, assert_one_branch, cut_off, echoes, recorded, stage, thinks
from rolltape.records.fork import ForkCause
from rolltape.records.sample import Fate
from rolltape.records.turn import TurnFlag
from scripted_engine import Asked, Json, Step

QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}
DONE = thinks("All is well.\n\n  Indeed.", "out.txt  has two lines.\n\n")
WRITE = ("Write", {"file_path": "out.txt", "content": "a\n5000\n"})


async def run_claude(it: Stage, *arguments: str, quiet: bool = True) -> Ran:
    env = {"IS_SANDBOX": "1", "ANTHROPIC_BASE_URL": it.session.anthropic_base_url, "ANTHROPIC_API_KEY": "none"}
    env |= {"ANTHROPIC_MODEL": "scripted", **(QUIET if quiet else {})}
    return await it.agent([claude_code(), "--dangerously-skip-permissions", "-p", *arguments], env)


async def test_a_task_with_several_tool_calls_is_one_branch_that_trains_whole(tmp_path: Path) -> None:
    script = [
        thinks("I write it first.", "I will write the file.\n\n", WRITE, ("Bash", {"command": "pwd"})),
        thinks("One is missing.", "", ("Edit", {"file_path": "out.txt", "old_string": "5000", "new_string": "5001"})),
        thinks("", "Now I look.", ("Read", {"file_path": "out.txt"}), ("Bash", {"command": "cat out.txt"})),
        DONE,
    ]
    async with stage(tmp_path, script) as it:
        ran = await run_claude(it, "Write a and 5001 into out.txt.")
        await it.session.finish(reward=1.0)
    assert (ran.code, ran.out.strip()) == (0, "out.txt  has two lines.")
    assert (it.work / "out.txt").read_text() == "a\n5001\n"
    made = assert_one_branch(it, turns=4)
    assert echoes(made) == {"arguments_normalized"}  # of Edit, which is filled in


async def test_calls_that_come_back_as_claude_code_ran_them_are_echoes(tmp_path: Path) -> None:
    first: list[tuple[str, Json]] = [
        ("Write", {"file_path": "out.txt", "content": "trailing  \n\tblank \n"}),
        ("Bash", {"command": f"cd {tmp_path}/work && echo here", "timeout": "5000", "description": "Say it"}),
    ]
    second: list[tuple[str, Json]] = [
        ("Edit", {"new_string": "ends  ", "old_string": "trailing", "file_path": "out.txt", "replace_all": "true"}),
        ("Read", {"file_path": "out.txt", "offset": "1", "limit": 2.0}),
        ("Bash", {"command": r"find . -name out.txt -exec echo \u00e9 \ud83d\ude00 {} \\;"}),
        ("Bash", {"command": "echo 1", "more": 12345678901234567890, "none": None}),
        ("NoSuchTool", {"x": 1e3}),
    ]
    async with stage(tmp_path, [thinks("One.", "", *first), thinks("Two.", "", *second), DONE]) as it:
        ran = await run_claude(it, "Try all tools.")
        await it.session.finish()
    assert ran.code == 0
    assert echoes(assert_one_branch(it, turns=3)) == {"arguments_normalized"}


async def test_a_second_task_in_the_same_conversation_goes_on_in_the_same_branch(tmp_path: Path) -> None:
    script = [
        thinks("A call.", "", WRITE),
        thinks("Badly.", 'I look.\n<tool_call>\n{"name": "Bash", "arguments": {"command": \n</tool_call>'),
        thinks("Better.", "", ("Bash", {"command": "cat out.txt"})),
        DONE,
    ]
    # Qwen3's own template drops earlier thinking where a new user message comes.
    async with stage(tmp_path, script, thinking_retention="all") as it:
        first = await run_claude(it, "Write a and 5000 into out.txt.")
        second = await run_claude(it, "Look at it.", "--continue")
        await it.session.finish()
    assert (first.code, second.code) == (0, 0)
    assert "<tool_call>" in first.out  # a malformed call is delivered as the text that it is, and comes back as such
    made = assert_one_branch(it, turns=4)
    flagged = [TurnFlag.MALFORMED_CALL in turn.facts.flags for turn in made.rollout.turns]
    assert flagged == [False, True, False, False]


async def test_a_sub_agent_is_the_one_fork_and_says_so(tmp_path: Path) -> None:
    helper = {"description": "look", "prompt": "List the files.", "subagent_type": "Explore"}
    script = {
        "task": [thinks("Help!", "I ask.", ("Agent", helper)), thinks("So.", "", WRITE), DONE],
        "helper": [thinks("I look.", "", ("Bash", {"command": "ls"})), thinks("Nothing.", "There is nothing.")],
    }

    def whose(asked: Asked) -> str:
        return "task" if "Have a helper look" in asked.prompt else "helper"

    async with stage(tmp_path, lambda asked: script[whose(asked)].pop(0), engine={"conversation": whose}) as it:
        ran = await run_claude(it, "Have a helper look.")
        await it.session.finish()
    assert ran.code == 0
    assert it.engine.violations == []
    made = recorded(it)
    assert [fork.cause for fork in made.forks] == [ForkCause.SUB_AGENT]
    assert len(made) == 2
    assert made.ledger.totals() == {Fate.TRAINED: made.ledger.sampled}


async def test_a_compaction_is_called_so_and_all_that_was_sampled_trains(tmp_path: Path) -> None:
    summary = "<analysis>\nIt was about counting.\n</analysis>\n\n<summary>\n1. All numbers were to be counted.\n"
    summary += "2. They were counted one after the other, and nothing is left to do.\n</summary>"
    count = thinks("On.", "I count.", ("Bash", {"command": "seq 1 3"}))
    script = [count, count, DONE, thinks("Briefly.", summary), thinks("", "Well.")]
    async with stage(tmp_path, script, engine={"conversation": lambda asked: None}) as it:
        ran = [await run_claude(it, "Count."), await run_claude(it, "--continue", "/compact")]
        ran.append(await run_claude(it, "--continue", "And now?"))
        await it.session.finish()
    assert [one.code for one in ran] == [0, 0, 0]
    made = recorded(it)
    assert [fork.cause for fork in made.forks] == [ForkCause.COMPACTION] * 2
    assert made.ledger.totals() == {Fate.TRAINED: made.ledger.sampled}


async def test_the_title_it_asks_for_on_the_side_is_recorded_and_does_not_train(tmp_path: Path) -> None:
    script = [thinks("", "", WRITE), DONE]

    def said(asked: Asked) -> str:
        return script.pop(0) if "<tools>" in asked.prompt else '{"title": "Writing a file"}'

    def whose(asked: Asked) -> str | None:
        return "task" if "<tools>" in asked.prompt else None

    async with stage(tmp_path, said, engine={"conversation": whose}) as it:
        ran = await run_claude(it, "Write a and 5000 into out.txt.", quiet=False)
        await it.session.finish()
    assert ran.code == 0
    made = recorded(it)
    aside = [turn for turn in made.rollout.turns if turn.facts.auxiliary is not None]
    assert [turn.facts.auxiliary for turn in aside] == ["session title"]
    title_tokens = len(aside[0].sampled_ids)
    assert made.ledger.totals() == {
        Fate.TRAINED: made.ledger.sampled - title_tokens,
        Fate.DROPPED_AUXILIARY: title_tokens,
    }
    assert (len(made), made.forks, it.engine.violations) == (1, [], [])


async def test_a_refusal_ends_it_at_once(tmp_path: Path) -> None:
    again = thinks("On and on.", "", ("Bash", {"command": "true"}))
    async with stage(tmp_path, [again] * 9, spec={"max_turns": 2}) as it:
        over = await run_claude(it, "Go on for ever.")
        assert (over.code, it.refused(), it.engine.requests) == (1, 1, 2)
        assert "has reached its maximum of turns (2)" in over.out
        await it.session.finish()
        late = await run_claude(it, "Go on for ever.")
        assert (late.code, it.refused()) == (1, 2)
        assert "takes no more turns" in late.out
    assert_one_branch(it, turns=2)


async def test_a_dropped_connection_is_retried_and_gets_the_same_turn(tmp_path: Path) -> None:
    long = thinks("I write it first.", "I will write the file now, and then we shall see.", WRITE)
    script: list[str | Step] = [thinks("", "", ("Bash", {"command": "ls"})), Step(long, token_delay_s=0.01), DONE]
    it, ran = await cut_off(tmp_path, script, lambda it: run_claude(it, "Write a and 5000 into out.txt."))
    assert ran.code == 0
    assert (it.work / "out.txt").read_text() == "a\n5000\n"
    assert_one_branch(it, turns=4)  # the second was cut off, and the third goes on from where it was
