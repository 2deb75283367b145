"""Write a constraint as a structural tag for SGLang and vLLM: xgrammar's format for text, tags and schemas.

Thinking is part of the tag. So the tag applies from the first token on, and no server has to know where thinking ends.
"""

from typing import Any

import msgspec

from rolltape.gateway.prompts.families import THINK_END, THINK_START
from rolltape.gateway.prompts.reply_form import Thinking
from rolltape.gateway.turn.constraints import Constraint

Format = dict[str, Any]

_ANY_TEXT: Format = {"type": "any_text"}
_LINE_BREAKS: Format = {"type": "regex", "pattern": "\\n{0,2}"}  # as models write them after thinking


def structural_tag(constraint: Constraint) -> str:
    """The tag as JSON, for a constraint that is not only a schema."""
    answer = _answer(constraint)
    if not constraint.free_text and constraint.thinking is not Thinking.OFF:
        answer = _sequence(_LINE_BREAKS, answer)
    thought = {"type": "tag", "begin": THINK_START, "content": _ANY_TEXT, "end": THINK_END}
    match constraint.thinking:
        case Thinking.BEGUN:
            answer = _sequence(thought | {"begin": ""}, answer)
        case Thinking.POSSIBLE:
            answer = _either(_sequence(thought, answer), answer)
    return msgspec.json.encode({"type": "structural_tag", "format": answer}).decode()


def _answer(constraint: Constraint) -> Format:
    """The format of what follows thinking."""
    if constraint.free_text:
        return _free_text(constraint)
    answers: list[Format] = []
    if constraint.calls:
        answers.append(_calls(constraint))
    if constraint.schema is not None:
        answers.append({"type": "json_schema", "json_schema": constraint.schema})
    return answers[0] if len(answers) == 1 else _either(*answers)


def _free_text(constraint: Constraint) -> Format:
    """Any text, in which each call must be one of the constraint's."""
    assert constraint.form is not None
    trigger = constraint.form.begin.split("\n")[0]
    tags = _tags(constraint)
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": constraint.one_call}


def _calls(constraint: Constraint) -> Format:
    form = constraint.form
    assert form is not None
    calls: Format = {
        "type": "tags_with_separator",
        "tags": _tags(constraint),
        "separator": form.between or "",
        "at_least_one": True,
        "stop_after_first": constraint.one_call,
    }
    around = [{"type": "const_string", "value": text} for text in (form.opening, form.closing) if text]
    if not around:
        return calls
    return _sequence(*around[: bool(form.opening)], calls, *around[bool(form.opening) :])


def _tags(constraint: Constraint) -> list[Format]:
    """One tag for each tool."""
    form = constraint.form
    assert form is not None
    style = {} if form.style == "json" else {"style": form.style}
    return [
        {
            "type": "tag",
            "begin": f"{form.begin}{name}{form.middle}",
            "content": {"type": "json_schema", "json_schema": schema, **style},
            "end": form.end,
        }
        for name, schema in constraint.calls.items()
    ]


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}
