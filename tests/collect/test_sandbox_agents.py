"""Agents written with the openai and anthropic packages, out of this project's own environment, in a sandbox."""

import sys
from pathlib import Path

from bwrap import needs_bwrap
from collecting import collected, instant, rollouts, task_file
from rolltape.collect.sandboxes import SandboxKind

AGENT = """
import asyncio, json, sys
import anthropic, openai
told = json.load(sys.stdin)

async def main():
    async with openai.AsyncOpenAI() as client:
        request = {"model": told["model"], "messages": told["messages"]}
        async with client.chat.completions.stream(**request) as events:
            print((await events.get_final_completion()).choices[0].message.content)
        print((await client.responses.create(model=told["model"], input=told["messages"])).output_text)
    async with anthropic.AsyncAnthropic() as client:
        async with client.messages.stream(model=told["model"], messages=told["messages"], max_tokens=100) as events:
            print((await events.get_final_message()).content[0].text)

asyncio.run(main())
"""


async def test_clients_of_all_three_apis_finish_in_a_sandbox(tmp_path: Path) -> None:
    needs_bwrap()
    (tmp_path / "agent.py").write_text(AGENT)
    source = task_file(tmp_path, [{"id": "t", "prompt": "What is 3 + 1?", "answer": 4}])
    async with instant() as engine:
        agent = f"command:{sys.executable} {tmp_path / 'agent.py'}"
        run, sandbox = tmp_path / "run", SandboxKind.BWRAP
        results = await collected(source, run, engine, agent=agent, group_size=2, sandbox=sandbox)
    assert [(result.reason, result.reward, result.turns) for result in results] == [(None, 1.0, 3)] * 2
    for one in rollouts(tmp_path / "run"):
        assert (tmp_path / "run" / "logs" / one.id / "stdout.txt").read_text() == "4\n4\n4\n"
