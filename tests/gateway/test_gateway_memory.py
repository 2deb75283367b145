"""What a session that has ended leaves behind in memory."""

import gc
from pathlib import Path

import pytest

from gateways import Api, rig, slowly, streamed_text_of, user

# What a session makes with each turn. Whole gateways of earlier tests may become garbage at any time.
_OF_SESSIONS = (
    *("rolltape.gateway.turn.gateway_turn", "rolltape.gateway.turn.history"),
    *("rolltape.records", "rolltape.tree", "rolltape.gateway.request"),
)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_sessions_that_ended_are_freed_without_looking_for_cycles(run: Path, stream: bool) -> None:
    async with rig(run, slowly("hello there", 0)) as it:
        gc.collect()
        gc.disable()
        try:
            for number in range(3):
                opened = await it.open(attempt=number)
                messages = [user("hi")]
                for _ in range(2):
                    answer = await it.ask(opened, messages, stream=stream)
                    said = streamed_text_of(Api.CHAT, answer) if stream else "hello there"
                    messages += [{"role": "assistant", "content": said}, user("more")]
                await it.finish(opened, samples=False)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith(_OF_SESSIONS)}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert left == set()
