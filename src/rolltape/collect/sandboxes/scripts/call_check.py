"""Calls a check function inside a sandbox, for functions that run what an agent has written.

It runs as a script. The order is JSON on stdin. The first line of its output is JSON: the score, or the function's
error. The function's own output goes to stderr, and processes that it starts do not inherit the output for the answer.
"""

import asyncio
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

_PR_SET_DUMPABLE = 4  # of linux/prctl.h


def call(order: dict[str, Any]) -> dict[str, Any]:
    """The score as an object, or an error."""
    import msgspec

    from rolltape.collect.environments.protocol import Ended
    from rolltape.collect.environments.scoring import parse_score
    from rolltape.collect.functions import call_function, function_named

    ended = msgspec.convert(order["ended"] | {"folder": None}, Ended)
    ended = msgspec.structs.replace(ended, folder=Path.cwd())
    try:
        os.chdir("/")  # Python searches modules in the working directory first, which is the agent's
        function = function_named(order["function"])
        os.chdir(os.environ["TMPDIR"])
        found = asyncio.run(call_function(function, order["entry"], ended))
        return {"score": msgspec.structs.asdict(parse_score(found, order["function"]))}
    except Exception as error:  # noqa: BLE001 - anybody's function may raise anything
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the function's processes must not read this one's memory
    answers = os.dup(1)
    os.dup2(2, 1)
    order = json.load(sys.stdin)
    os.environ["PYTHONPYCACHEPREFIX"] = (
        "/nonexistent"  # programs that the function starts do not load compiled files of the agent
    )
    sys.path[:] = order["path"]
    from rolltape.records.jsonable import decode_numbers, encode_numbers

    order = decode_numbers(json.dumps(order).encode())
    os.write(answers, encode_numbers(call(order), f"the score of {order['function']}") + b"\n")


if __name__ == "__main__":
    main()
