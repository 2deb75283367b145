"""What a request demands of the form of its reply, and whether the reply meets it.

A forced call, a JSON schema and strict tools become one constraint, which each engine translates into its own format.
`parallel_tool_calls: false` needs no constraint. The reply is cut after its first call; the ids up to there were
sampled freely.
"""

import enum
import json
from typing import Any, Literal

import msgspec

from rolltape.gateway.prompts.reply_form import CallForm, ReplyForm, Thinking
from rolltape.gateway.request import STRICT, ChatRequest
from rolltape.gateway.turn.json_schemas import follows_schema
from rolltape.records.messages import content_text
from rolltape.records.turn import Ids

ConstrainLevel = Literal["none", "forced", "all"]


class Ability(enum.StrEnum):
    """What an engine must be able to do for a constraint."""

    JSON_SCHEMA = "JSON schemas"
    STRUCTURAL_TAGS = "structural tags"
    THINKING_BEGUN = "a constraint that holds only after thinking"


class Constraint(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a reply must be: calls, or a JSON text, or with `free_text` any text whose calls follow their schema."""

    fields: tuple[str, ...]  # the fields of the request that demand it
    schema: dict[str, Any] | None = None  # of the text; None if no JSON text is demanded
    calls: dict[str, dict[str, Any]] = {}  # tools that may be called, with the schema of their arguments
    form: CallForm | None = None  # of calls; None if there may be none
    one_call: bool = False  # at most
    free_text: bool = False
    thinking: Thinking = Thinking.OFF
    think_end_id: int | None = None

    @property
    def needs(self) -> frozenset[Ability]:
        if self.thinking is Thinking.OFF and not self.calls:
            return frozenset({Ability.JSON_SCHEMA})
        begun = {Ability.THINKING_BEGUN} if self.thinking is Thinking.BEGUN else set()
        return frozenset({Ability.STRUCTURAL_TAGS, *begun})

    def after(self, sampled: Ids) -> "Constraint | None":
        """The constraint on the rest of a reply, or None if engines cannot continue in the middle of it."""
        if not len(sampled):
            return self
        if self.thinking is Thinking.OFF or bool((sampled == self.think_end_id).any()):
            return None
        return msgspec.structs.replace(self, thinking=Thinking.BEGUN)


def build_constraint(
    request: ChatRequest,
    form: ReplyForm,
    thinking: Thinking | None,
    level: ConstrainLevel,
    abilities: frozenset[Ability],
) -> tuple[Constraint | None, list[str]]:
    """The constraint of a request, and what is not enforced, as `ignored_params` lists it."""
    fields = request.demands
    enforced = tuple(field for field in fields if level == "all" or (level == "forced" and field != STRICT))
    ignored = [f"{field}: {_UNENFORCED[field == STRICT]}" for field in fields if field not in enforced]
    if not enforced:
        return None, ignored
    found = _constraint(request, enforced, form, thinking)
    if isinstance(found, Constraint) and found.needs <= abilities:
        return found, ignored
    if isinstance(found, Constraint):
        found = f"the engine cannot enforce {', '.join(sorted(found.needs - abilities))}"
    return None, [*ignored, *(f"{field}: {found}; the model is free" for field in enforced)]


_UNENFORCED = (
    "not enforced, because of --constrain none",
    "arguments are not held to the schema, since constrained tokens do not train; --constrain all enforces it",
)


def _constraint(
    request: ChatRequest, fields: tuple[str, ...], form: ReplyForm, thinking: Thinking | None
) -> Constraint | str:
    """The constraint, or the reason why it cannot be built."""
    required, callable_ = request.tool_choice.mode == "required", request.tool_choice.mode != "none"
    schema = None if request.output_schema is None or required else request.output_schema.schema
    calls = _callable_tools(request) if callable_ else {}
    if thinking is None:
        return "how this model marks the end of its thinking is not known"
    if required and not calls:
        return "no such tool is offered"
    if calls and form.call is None:
        return "the exact form of this model's calls is not known"
    if schema is not None and not form.plain:
        return "the exact form of this model's texts is not known"
    free_text = schema is None and not required
    if free_text and not _is_marked(form.call):
        return "this model's calls do not begin with a mark of their own"
    assert form.call is not None or not calls
    return Constraint(
        fields=fields,
        schema=schema,
        calls=calls,
        form=form.call if calls else None,
        one_call=bool(calls) and (not request.parallel_tool_calls or form.call is None or form.call.between is None),
        free_text=free_text,
        thinking=thinking,
        think_end_id=form.think_end_id,
    )


def _callable_tools(request: ChatRequest) -> dict[str, dict[str, Any]]:
    """The tools that may be called, with their schemas. Unless a call is forced, only strict tools keep theirs."""
    forced = request.tool_choice.mode == "required"
    tools = {tool["function"]["name"]: tool["function"].get("parameters") for tool in request.all_tools or ()}
    return {
        name: schema if schema and (forced or name in request.strict_tools) else {"type": "object"}
        for name, schema in tools.items()
        if request.tool_choice.name in (None, name)
    }


def _is_marked(form: CallForm | None) -> bool:
    return form is not None and not form.opening and form.begin.startswith("<")


def can_cut_calls(form: ReplyForm) -> bool:
    """Whether a reply may end after its first call, because the form has no closing text after the calls."""
    return form.call is not None and not form.call.closing


def is_met(request: ChatRequest, message: dict[str, Any]) -> bool:
    """Whether a complete reply meets the demands of its request."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if request.tool_choice.mode == "required":
        names = {call["name"] for call in calls}
        if not names or (request.tool_choice.name is not None and names != {request.tool_choice.name}):
            return False
    elif request.output_schema is not None and not calls:
        return _is_valid(content_text(message.get("content")), request.output_schema.schema)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in request.all_tools or ()}
    strict = (call for call in calls if call["name"] in request.strict_tools)
    return all(_is_valid(call["arguments"], schemas.get(call["name"]) or {}) for call in strict)


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return follows_schema(value, schema)
