"""A server of the Model Context Protocol without any package, over stdin and stdout, that can misbehave.

    python plain_mcp_server.py [--pid FILE] [--tools FILE] [--deaf]

`--tools` has the tools to list in place of its own, as they are to be sent. With `--deaf` it does not end when
its stdin does.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [
    {"name": name, "description": what, "inputSchema": _NUMBERS}
    for name, what in (
        ("add", "Add two numbers."),
        ("fail", "Report an error."),
        ("hang", "Never answer."),
        ("die", "End the server."),
        ("babble", "Answer with what is no JSON."),
    )
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pid", type=Path)
    parser.add_argument("--tools", type=Path)
    parser.add_argument("--deaf", action="store_true")
    given = parser.parse_args()
    if given.pid is not None:
        with given.pid.open("a") as pids:
            pids.write(f"{os.getpid()}\n")
    tools = TOOLS if given.tools is None else given.tools.read_text()
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            respond(message, tools)
    if given.deaf:
        time.sleep(600)


def respond(message: dict[str, Any], tools: Any) -> None:
    method, params = message["method"], message.get("params") or {}
    if method == "initialize":
        info = {"name": "plain", "version": "1"}
        version = params["protocolVersion"]
        result(message, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
    elif method == "tools/list" and isinstance(tools, str):
        write(f'{{"jsonrpc": "2.0", "id": {json.dumps(message["id"])}, "result": {{"tools": {tools}}}}}')
    elif method == "tools/list":
        result(message, {"tools": tools})
    elif method == "tools/call":
        call(message, params["name"], params.get("arguments") or {})
    else:
        error(message, -32601, f"no method {method}")


def call(message: dict[str, Any], name: str, arguments: dict[str, Any]) -> None:
    match name:
        case "add" if isinstance(arguments.get("a"), int) and isinstance(arguments.get("b"), int):
            result(message, {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]})
        case "add":
            error(message, -32602, "a and b must be whole numbers")
        case "fail":
            result(message, {"content": [{"type": "text", "text": "out of order"}], "isError": True})
        case "hang":
            time.sleep(600)
        case "die":
            print("giving up", file=sys.stderr, flush=True)
            os._exit(3)
        case "babble":
            write("this is no JSON")
            write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": 7}))


def result(message: dict[str, Any], value: Any) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": value}))


def error(message: dict[str, Any], code: int, text: str) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": {"code": code, "message": text}}))


def write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
