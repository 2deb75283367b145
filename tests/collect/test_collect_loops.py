"""Loops for code of the user: what blocks one is counted, a blocked one is replaced, and a forked child has its own."""

import asyncio
import os
import threading

import pytest

from rolltape.collect import loops
from rolltape.collect.loops import BlockedTime, WatchedLoop, abandon_loop, user_loop, watching_loop


async def test_a_stop_of_the_whole_process_counts_as_blocked() -> None:
    with watching_loop("other"):  # so that the process is watched
        watched = WatchedLoop(asyncio.get_running_loop(), "test", threading.get_ident())
        blocked = BlockedTime(watched)
        watched.look(stopped_s=7.0)
        assert blocked.seconds >= 7.0
        assert "what held the whole process" in blocked.culprit


async def test_a_loop_that_is_blocked_is_replaced_once() -> None:
    first = user_loop("module_of_loops")
    abandon_loop("module_of_loops", first)
    second = user_loop("module_of_loops")
    abandon_loop("module_of_loops", first)  # of another call that waited for it
    assert user_loop("module_of_loops") is second
    assert second is not first
    assert await second.submit("a call", lambda: threading.current_thread().name) == "rolltape-module_of_loops"


async def test_code_that_wants_to_end_the_process_ends_its_own_call_alone() -> None:
    def leaves() -> None:
        raise SystemExit(3)

    loop = user_loop("module_of_loops")
    with pytest.raises(RuntimeError, match="it raised SystemExit"):
        await loop.submit("a call", leaves)
    assert await loop.submit("a call", lambda: 4) == 4


def test_a_forked_child_has_loops_of_its_own() -> None:
    user_loop("module_of_loops")
    child = os.fork()
    if not child:
        os._exit(7 if not loops._USER_LOOPS and user_loop("module_of_loops").call("a call", lambda: 4) == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
