"""What is shown of a reply while it is sampled is a beginning of its message, and comes as early as it is certain."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompts.conversing import ASKED, LOOK, TINY, called, ids_of
from prompts.family_folders import prompts_of
from rolltape.gateway.prompts import ChatPrompts
from rolltape.gateway.prompts.families import REPLY_MARKS
from rolltape.gateway.prompts.tokenizer import FolderTokenizer
from rolltape.records.turn import Ids, TokenChain

THINKS = ("<think>", "</think>")
# Vocabularies without tokens for thinking spell its marks.
SPELLED = ("deepseek-v3", "deepseek-r1", "kimi-k2", "kimi-k2.5")
MODELS: list[tuple[str, tuple[str, ...]]] = [(family, ()) for family in sorted(REPLY_MARKS)]
MODELS += [(family, THINKS) for family in SPELLED if family in REPLY_MARKS]
GOOD = '<tool_call>\n{"name": "look", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model[0] + (" spelled" if model[1] else ""))
def live(request: pytest.FixtureRequest, scratch: Path) -> ChatPrompts:
    family, without = request.param
    return prompts_of(family, scratch, without)


@cache
def prompt_of(prompts: ChatPrompts, thinking: bool | None = None) -> TokenChain:
    return TokenChain(prompts.render([ASKED], [LOOK], thinking).ids)


def shown(
    prompts: ChatPrompts, chunks: Sequence[Ids], thinking: bool | None = None, stops: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """The thinking and the text that are shown after each chunk."""
    splitter = prompts.splitter(prompt_of(prompts, thinking), thinking, stops)
    assert splitter is not None
    steps = []
    for chunk in chunks:
        splitter.add(chunk.tolist())
        steps.append((splitter.reasoning, splitter.text))
    return steps


def one_by_one(prompts: ChatPrompts, *texts: str | list[int]) -> list[Ids]:
    """The ids of texts, encoded each by itself, as chunks of one."""
    ids = [token for text in texts for token in (prompts._tokenizer.encode(text) if isinstance(text, str) else text)]
    return [np.array([token], np.int32) for token in ids]


def letters(text: str | bytes) -> list[int]:
    """A text in ordinary tokens of one byte each, also where it spells a token or is no valid text."""
    data = text if isinstance(text, bytes) else text.encode()
    return [SPELLINGS[bytes([byte])] for byte in data]


_TOKENIZER = FolderTokenizer(TINY)
SPELLINGS = {_TOKENIZER.token_bytes(token): token for token in range(4087)}


def read(prompts: ChatPrompts, ids: Ids, thinking: bool | None = None, **options: Any) -> tuple[str, str]:
    parsed = prompts.parse(prompt_of(prompts, thinking), ids, [LOOK], thinking, **options)
    return parsed.reasoning or "", parsed.content


STOPS = ("STOP", "\n\nHuman", "ö!")
TEXTS = (
    "I look. ",
    "\n",
    "\n\n",
    "  ",
    "Ko\u0308ln 👩‍👩‍👧",
    "S",
    "ST",
    "STO",
    "OP",
    "STOP",
    "\n\nHum",
    "an",
    "{",
    "}",
    "<",
    "</",
    "ö!",
)
CALL_BODIES = (
    '\n{"name": "look", "arguments": {"city": "Köln"}}\n',
    "\n<function=look>\n<parameter=city>\nKöln\n</parameter>\n</function>\n",
    '{"name": "look", "parameters": {"city": "Köln"}}',
)
pieces = st.one_of(
    st.tuples(st.just("text"), st.sampled_from(TEXTS) | st.text(max_size=8)),
    st.tuples(st.just("letters"), st.sampled_from(("👩", "ö", "<think>", "</think>", "<tool_call>", " \t", "STOP"))),
    st.tuples(st.just("letters"), st.binary(max_size=4)),
    st.tuples(st.just("added"), st.integers(0, 30)),
    st.tuples(st.just("call"), st.integers(0, 3)),
    st.tuples(st.sampled_from(("mark", "spelled mark")), st.integers(0, 30)),
    st.tuples(st.just("id"), st.integers(0, 5000)),
)


def ids_of_pieces(prompts: ChatPrompts, written: Sequence[tuple[str, Any]]) -> Ids:
    """A reply of texts, single bytes, marks of the family and its calls."""
    encode = prompts._tokenizer.encode
    added = sorted(prompts._tokenizer._tokenizer.get_added_tokens_decoder())
    ids: list[int] = []
    for kind, value in written:
        if kind == "text":
            ids += encode(value.encode(errors="replace").decode())
        elif kind == "letters":
            ids += letters(value)
        elif kind == "added":
            ids.append(added[value % len(added)])
        elif kind == "call":
            ids += encode(own_call(prompts) if value == 3 else f"<tool_call>{CALL_BODIES[value]}</tool_call>")
        elif kind in ("mark", "spelled mark"):
            mark = marks_of(prompts)[value % len(marks_of(prompts))]
            ids += encode(mark) if kind == "mark" else letters(mark)
        else:
            ids.append(value)
    return np.array(ids, np.int32)


def marks_of(prompts: ChatPrompts) -> tuple[str, ...]:
    marks = REPLY_MARKS[prompts._choice.name]
    return (marks.think_start, marks.think_end, *marks.calls, *marks.spelled_calls)


@cache
def own_call(prompts: ChatPrompts) -> str:
    """A call as the family's own renderer writes it."""
    prompt = prompts.render([ASKED], [LOOK], None).ids
    message = called({"city": "Köln"})
    message["tool_calls"][0]["id"] = "functions.look:0"  # Kimi's calls are named by it
    whole = prompts.render([ASKED, message], [LOOK], None).ids
    same = next((at for at, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other), len(prompt))
    following = prompts._tokenizer.convert_tokens_to_ids("<|assistant|>")  # GLM's replies end in the next turn's mark
    ends = np.flatnonzero(np.isin(whole[same:], [*prompts.stop_ids, -1 if following is None else following]))
    return prompts.decode(whole[same : same + ends[0]]).rsplit(REPLY_MARKS[prompts._choice.name].think_end)[-1]


@given(data=st.data(), written=st.lists(pieces, max_size=10), thinking=st.sampled_from([None, True, False]))
@settings(deadline=None, max_examples=80)
def test_whatever_is_shown_is_a_beginning_of_the_message_however_the_reply_goes_on(
    live: ChatPrompts, data: st.DataObject, written: list[tuple[str, Any]], thinking: bool | None
) -> None:
    ids = ids_of_pieces(live, written)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    stops = data.draw(st.lists(st.sampled_from(STOPS), max_size=2))
    ends = [*cuts, len(ids)]
    steps = shown(live, [ids[start:end] for start, end in zip([0, *cuts], ends, strict=True)], thinking, stops)
    before = ("", "")
    for end, step in zip(ends, steps, strict=True):
        assert [now.startswith(then) for now, then in zip(step, before, strict=True)] == [True, True]
        before = step
        for stop in (None, *stops):
            for as_text in (False, True):
                message = read(live, ids[:end], thinking, stop_string=stop, calls_as_text=as_text)
                assert [now.startswith(part) for now, part in zip(message, step, strict=True)] == [True, True]


@given(written=st.lists(pieces, max_size=10), thinking=st.sampled_from([None, True, False]))
@settings(deadline=None, max_examples=80)
def test_a_message_with_its_calls_as_text_holds_all_that_was_written(
    live: ChatPrompts, written: list[tuple[str, Any]], thinking: bool | None
) -> None:
    ids = ids_of_pieces(live, written)
    ends = np.flatnonzero(np.isin(ids, live.stop_ids))
    message = read(live, ids, thinking, calls_as_text=True)
    assert bare(live, "".join(message)) == bare(live, live.decode(ids[: ends[0]] if len(ends) else ids))


def bare(prompts: ChatPrompts, text: str) -> str:
    """A text without white space and marks of thinking, also those that come about as others go."""
    text, before = "".join(text.split()), None
    while text != before:
        before = text
        for mark in marks_of(prompts)[:2]:
            text = text.replace(mark, "")
    return text


@given(ids=st.lists(st.integers(0, 4095), max_size=40), text=st.text(max_size=20))
@settings(deadline=None)
def test_the_text_of_ids_is_their_bytes_put_together(tiny: ChatPrompts, ids: list[int], text: str) -> None:
    tokenizer = tiny._tokenizer
    ids += tokenizer.encode(text.encode(errors="replace").decode())
    assert b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace") == tokenizer.decode(ids)


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=60))
@settings(deadline=None)
def test_text_is_shown_with_the_id_that_completes_it(live: ChatPrompts, text: str) -> None:
    ids = live._tokenizer.encode(text.replace("<", "(").replace("{", "("))
    steps = shown(live, one_by_one(live, ids))
    done = [live.decode(np.array(ids[:end])).rstrip("\ufffd").strip() for end in range(1, len(ids) + 1)]
    assert ["".join(step) for step in steps] == done  # it is thinking where the prompt has opened that


def test_thinking_and_text_are_shown_as_they_come(prompts: ChatPrompts) -> None:
    parts = ("<think>", "\n", "hm", " so", "\n", "</think>", "\n\n", "I", " look", ".", "\n", GOOD, "\nSo.")
    steps = shown(prompts, [ids_of(prompts, part, stopped=False) for part in parts])
    assert [thought for thought, _ in steps] == ["", "", "hm", *["hm so"] * 10]
    assert [text for _, text in steps] == [*[""] * 7, "I", "I look", *["I look."] * 4]


def test_an_unfinished_letter_is_withheld_and_an_invalid_byte_shown_once_it_is_certain(tiny: ChatPrompts) -> None:
    smile = letters("😀")
    assert [text for _, text in shown(tiny, one_by_one(tiny, "a", smile))] == ["a", "a", "a", "a", "a😀"]
    broken = shown(tiny, one_by_one(tiny, "a", smile[:2], "b"))
    assert [text for _, text in broken] == ["a", "a", "a", "a\ufffdb"]


def test_an_unfinished_letter_or_spelled_mark_before_a_call_stays_before_it(tiny: ChatPrompts, scratch: Path) -> None:
    written = np.array([*letters("a😀")[:-1], *tiny._tokenizer.encode(GOOD)], np.int32)
    assert shown(tiny, [written]) == [("", "a\ufffd")]
    assert read(tiny, written, calls_as_text=True) == ("", f"a\ufffd{GOOD}")
    kimi = prompts_of("kimi-k2", scratch, THINKS)
    call = own_call(kimi)
    written = ids_of(kimi, f"<thi{call}")
    assert shown(kimi, [written]) == [("", "<thi")]
    assert read(kimi, written, calls_as_text=True) == ("", f"<thi{call}")


def test_a_mark_spelled_in_ordinary_tokens_is_text(prompts: ChatPrompts) -> None:
    spelled = [ids_of(prompts, part, stopped=False) for part in ("<", "tool", "_", "call", ">")]
    assert shown(prompts, spelled)[-1] == ("", "<tool_call>")
    assert read(prompts, np.concatenate(spelled)) == ("", "<tool_call>")


def test_a_possible_beginning_of_a_stop_string_is_withheld_until_it_is_none(prompts: ChatPrompts) -> None:
    parts = [ids_of(prompts, part, stopped=False) for part in ("Go ", "ST", "O", "CK ", "ST", "OP", " more")]
    for begun in ([], [ids_of(prompts, "<think>", stopped=False)]):
        steps = ["".join(step) for step in shown(prompts, [*begun, *parts], stops=["STOP", "never"])][len(begun) :]
        assert steps == ["Go", "Go", "Go", "Go STOCK", "Go STOCK", "Go STOCK", "Go STOCK"]


def test_a_stop_string_inside_thinking_that_goes_on_did_not_end_the_reply(prompts: ChatPrompts) -> None:
    written = ids_of(prompts, "<think>a STOP b</think>Yes. STOP")
    assert shown(prompts, [written], stops=["STOP"]) == [("a STOP b", "Yes.")]
    assert read(prompts, written, stop_string="STOP") == ("a STOP b", "Yes.")


def test_a_stop_string_that_ends_at_a_call_is_withheld(prompts: ChatPrompts) -> None:
    written = ids_of(prompts, "I look.\n<tool_call>", stopped=False)
    assert shown(prompts, [written], stops=["look.\n<tool_call>"]) == [("", "I")]
    assert read(prompts, written, stop_string="look.\n<tool_call>") == ("", "I")


def test_a_call_inside_thinking_is_withheld_until_the_thinking_is_closed(prompts: ChatPrompts) -> None:
    draft = ids_of(prompts, f"<think>I could {GOOD} or", stopped=False)
    closed = ids_of(prompts, " not.</think>No.")
    steps = shown(prompts, [draft, closed])
    assert steps == [("I could", ""), (f"I could {GOOD} or not.", "No.")]
    assert read(prompts, np.concatenate([draft, closed])) == steps[-1]


def test_thinking_that_is_not_closed_stays_thinking(prompts: ChatPrompts) -> None:
    written = ids_of(prompts, f"<think>I look. {GOOD}")
    parsed = prompts.parse(prompt_of(prompts), written, [LOOK], None, calls_as_text=True)
    assert (parsed.reasoning, parsed.content) == ("I look.", GOOD)  # the call has ended it
    assert read(prompts, ids_of(prompts, "<think>I look")) == ("I look", "")


def test_a_mark_that_ends_no_thinking_is_text(prompts: ChatPrompts) -> None:
    for thinking in (None, False):
        written = ids_of(prompts, "So</think> <think>x</think>")
        assert shown(prompts, [written], thinking) == [("", "So</think> <think>x</think>")]


def test_ids_after_a_stop_id_are_nothing(prompts: ChatPrompts) -> None:
    written = [ids_of(prompts, "So."), ids_of(prompts, " And so on.")]
    assert shown(prompts, written) == [("", "So.")] * 2


@pytest.mark.parametrize("thinking", [None, True, False], ids=["by default", "on", "off"])
def test_each_family_finds_thinking_text_and_call_as_its_renderer_does(
    live: ChatPrompts, thinking: bool | None
) -> None:
    marks, prompt, call = REPLY_MARKS[live._choice.name], prompt_of(live, thinking), own_call(live)
    begun = live.splitter(prompt, thinking, [])
    assert begun is not None
    begun.add(ids_of(live, "x", stopped=False).tolist())
    thought = "" if marks.json_call else f"{'' if begun.reasoning else marks.think_start}\nhm\n{marks.think_end}\n"
    for text in ("", "I look.\n"):
        written = ids_of(live, thought + ("" if marks.json_call else text) + call)
        parsed = live.parse(prompt, written, [LOOK], thinking)
        response = live._renderer(thinking).parse_response(
            written.tolist(), tools=[LOOK], prompt_ids=prompt.slice(0).tolist()
        )
        assert [(one.name, one.arguments) for one in parsed.calls] == [("look", '{"city": "Köln"}')]
        if thinking is not False:  # GLM's renderer has no thinking then, also where the model thinks all the same
            assert parsed.content == response.content.strip()
            assert parsed.reasoning == ((response.reasoning_content or "").strip() or None)
        if thought:
            assert (parsed.reasoning, parsed.content) == ("hm", text.strip())
            assert parsed.reasoning_tokens == len(ids_of(live, thought.rstrip("\n"), stopped=False))
        assert shown(live, one_by_one(live, written.tolist()), thinking)[-1] == (parsed.reasoning or "", parsed.content)


@pytest.mark.parametrize("thinking", [None, True], ids=["by default", "on"])
def test_each_family_takes_a_call_in_open_thinking_as_its_renderer_does(
    live: ChatPrompts, thinking: bool | None
) -> None:
    marks, prompt = REPLY_MARKS[live._choice.name], prompt_of(live, thinking)
    written = ids_of(live, f"{marks.think_start}hm\n{own_call(live)}")
    parsed = live.parse(prompt, written, [LOOK], thinking)
    response = live._renderer(thinking).parse_response(
        written.tolist(), tools=[LOOK], prompt_ids=prompt.slice(0).tolist()
    )
    assert (parsed.reasoning or "") == (response.reasoning_content or "").strip()
    assert [call.name for call in parsed.calls] == [call.name for call in response.tool_calls]


@pytest.mark.parametrize("text", ['{"answer": 42}', '{"answer": 4', "{}", " {name}"])
def test_json_that_is_no_call_is_text_where_calls_are_bare_json(scratch: Path, text: str) -> None:
    llama = prompts_of("llama-3", scratch)
    written = ids_of(llama, text)
    parsed = llama.parse(prompt_of(llama), written, [LOOK], None)
    assert (parsed.content, parsed.malformed) == (text.strip(), False)
    assert shown(llama, [written]) == [("", "")]


def test_a_section_of_calls_without_a_call_is_delivered_as_text(scratch: Path) -> None:
    kimi = prompts_of("kimi-k2", scratch)
    written = ids_of(kimi, "I look. <|tool_calls_section_begin|>functions")
    parsed = kimi.parse(prompt_of(kimi), written, [LOOK], None)
    assert (parsed.content, parsed.malformed) == ("I look. <|tool_calls_section_begin|>functions", True)


def test_a_model_whose_marks_are_not_known_has_no_splitter(tiny: ChatPrompts) -> None:
    assert tiny.streams
    whole = ChatPrompts(TINY, renderer="default")
    assert not whole.streams
    assert whole.splitter(prompt_of(whole), None, []) is None
