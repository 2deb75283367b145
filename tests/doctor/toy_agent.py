"""An agent for tests, run as `command:` runs it: it calls the tool that it offers until the model calls none.

`python toy_agent.py HOW`: `faithful` sends replies back as they came, `shouts` and `summarizes` change its history,
`silent` never asks, `fails` ends with an error, `hangs` does not end.
"""

import json
import sys
import time
import urllib.request
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def ask(task: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": task["model"], "messages": messages, "tools": [TOOL]}
    headers = {"Authorization": f"Bearer {task['key']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{task['openai_base_url']}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
    return message


def changed(message: dict[str, Any], how: str) -> dict[str, Any]:
    """A reply as this agent sends it back."""
    if how == "shouts" and message.get("content"):
        return {**message, "content": message["content"].upper()}
    return message


def main(how: str) -> int:
    task = json.load(sys.stdin)
    if how == "silent":
        return 0
    if how == "hangs":
        time.sleep(600)
    messages = list(task["messages"])
    for _ in range(8):
        message = ask(task, messages)
        messages.append(changed(message, how))
        calls = message.get("tool_calls") or []
        if not calls:
            break
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
        if how == "summarizes":
            messages[0] = {"role": "user", "content": f"Go on, after {len(messages)} messages."}
    if how == "fails":
        print("out of luck", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
