"""Facts about the families of renderers that hold for each of them, on a vocabulary with the tokens that they need."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prompts.conversing import ASKED, HEARD, LOOK, SYSTEM, TOLD, called
from prompts.family_folders import prompts_of
from rolltape.gateway.prompts import PromptIds
from rolltape.gateway.prompts.families import READS_PROMPT_END, RENDERS_IN_PARTS
from rolltape.records.turn import TokenChain

NEWS: list[list[dict[str, Any]]] = [[HEARD], [HEARD, HEARD], [ASKED], [SYSTEM]]
REPLIES = ["I see. </think> Done.", "<think>unfinished", ""]


@pytest.mark.parametrize("family", sorted(READS_PROMPT_END))
@pytest.mark.parametrize("new", NEWS, ids=["response", "responses", "user", "system"])
@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "cut off"])
def test_the_end_of_a_prompt_does_for_the_whole(
    family: str, new: list[dict[str, Any]], stopped: bool, scratch: Path
) -> None:
    prompts = prompts_of(family, scratch)
    asked = [SYSTEM, ASKED | {"content": "words " * 200 + "</think> <think> x"}]
    prompt = prompts.render(asked, [LOOK], None).ids
    renderer = prompts._renderer(None)
    for text in REPLIES:
        reply = prompts._tokenizer.encode(text) + ([prompts.stop_ids[0]] if stopped else [])
        ready = prompts._prepared(new, opening=False).messages
        whole = renderer.bridge_to_next_turn(prompt.tolist(), reply, ready, tools=[LOOK])
        got = prompts.bridge(TokenChain(prompt), np.array(reply, np.int32), new, [LOOK], None)
        assert isinstance(got, PromptIds) == (whole is not None)
        if isinstance(got, PromptIds) and whole is not None:
            assert prompt.tolist() + reply + got.ids.tolist() == whole.token_ids
            assert len(got.message_starts or ()) == len(new)


KOELN = {"city": "Köln"}
MUSED = TOLD | {"reasoning_content": "hm"}
LATE = {"role": "system", "content": "Hurry."}
# (what stays, of which the last messages are read again; what is rendered anew)
PARTS: list[tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([SYSTEM], [ASKED], [MUSED, ASKED]),
    ([], [ASKED], [MUSED, ASKED]),
    ([SYSTEM, ASKED, TOLD], [ASKED], [called(KOELN, thinking="hm"), HEARD, MUSED, ASKED, ASKED]),
    ([SYSTEM, ASKED, TOLD], [ASKED], [called(KOELN), HEARD, called(KOELN, KOELN, thinking="hm"), HEARD, HEARD, ASKED]),
    ([SYSTEM, ASKED, called(KOELN), HEARD, MUSED], [ASKED, LATE], [TOLD, ASKED, LATE]),
    ([SYSTEM, ASKED, called(KOELN)], [HEARD, ASKED], [called(KOELN, content="So.", thinking="hm"), HEARD, ASKED]),
]


@pytest.mark.parametrize("family", sorted(RENDERS_IN_PARTS))
@pytest.mark.parametrize("tools", [[LOOK], None], ids=["tools", "no tools"])
def test_a_part_of_a_prompt_is_rendered_as_in_the_whole(
    family: str, tools: list[dict[str, Any]] | None, scratch: Path
) -> None:
    prompts = prompts_of(family, scratch)
    for stays, before, after in PARTS:
        held = prompts.render([*stays, *before], tools, None).ids
        whole = prompts.render([*stays, *before, *after], tools, None)
        got = prompts.splice(TokenChain(held), before, after, None)
        assert got is not None
        assert held[: got.kept].tolist() + got.new.ids.tolist() == whole.ids.tolist()
        assert whole.message_starts is not None
        assert got.starts == whole.message_starts[len(stays) + len(before) :]


def test_calls_under_ids_of_the_models_own_keep_them(scratch: Path) -> None:
    kimi = prompts_of("kimi-k2", scratch)
    assert kimi.tool_ids_matter
    prompt = kimi.render([ASKED], [LOOK], None).ids
    written = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        '{"city": "Köln"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    reply = np.array([*kimi._tokenizer.encode(written), kimi.stop_ids[0]], np.int32)
    parsed = kimi.parse(TokenChain(prompt), reply, [LOOK], None)
    assert [(call.name, call.native_id) for call in parsed.calls] == [("look", "functions.look:0")]


@pytest.mark.parametrize("family", ["qwen3.5", "nemotron-3", "minimax-m2"])
def test_late_system_messages_fold_where_a_family_refuses_or_drops_them(family: str, scratch: Path) -> None:
    prompts = prompts_of(family, scratch)
    late = {"role": "system", "content": "Hurry."}
    chat = [SYSTEM, ASKED, called({"city": "Köln"}), HEARD, late, ASKED]
    given = prompts.render(chat, [LOOK], None)
    assert given.folded == 1
    assert "<system-reminder>\nHurry.\n</system-reminder>\n\nHow is it" in prompts.decode(given.ids)
    assert given.message_starts is not None
    assert given.message_starts[4] == given.message_starts[5]
