"""Parse a Responses request."""

from typing import Any

from rolltape.gateway.exchange import Api, Ask, SamplingParams
from rolltape.gateway.wire.fields import Fields, read_body
from rolltape.gateway.wire.openai import check_function, custom_tool_function, read_effort, read_tool_choice
from rolltape.gateway.wire.responses_history import read_history
from rolltape.gateway.wire.responses_items import joined_name

# Of no effect on what the model does: bookkeeping, caching and speed at the provider, and what replies always have.
_HARMLESS = (
    "metadata",
    "client_metadata",
    "user",
    "safety_identifier",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "stream_options",
)
_INCLUDED = ("reasoning.encrypted_content",)


def read_ask(raw: bytes) -> Ask:
    """The body of a request; raises BadRequest."""
    body, repaired = read_body(raw)
    _refuse_unservable(body)
    offer = _Offer()
    offer.add_all(body.maybe_objects("tools") or [])
    ignored_params = offer.ignored_params
    choice, more = read_tool_choice(body, [tool["function"]["name"] for tool in offer.tools])
    ignored_params += more
    thinking = _thinking(body, ignored_params)
    output_schema = _output_schema(body, ignored_params)
    return Ask(
        api=Api.RESPONSES,
        model=body.name("model"),
        messages=_messages(body),
        tools=offer.tools or None,
        tool_choice=choice,
        parallel_tool_calls=body.maybe_flag("parallel_tool_calls") is not False,
        sampling=SamplingParams(
            temperature=body.maybe_number("temperature", least=0),
            top_p=body.maybe_number("top_p", least=0, most=1),
            max_tokens=body.maybe_whole("max_output_tokens", least=1),
        ),
        stream=body.maybe_flag("stream") or False,
        thinking=thinking,
        custom_tools=frozenset(offer.custom_tools),
        namespaces=frozenset(offer.namespaces),
        # After all others, since it names the fields that nobody read.
        ignored_params=tuple(dict.fromkeys((*ignored_params, *_ignored_params(body)))),
        output_schema=output_schema,
        repaired=repaired,
    )


def _refuse_unservable(body: Fields) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if body.get(name) is not None:
            body.refuse(name, "nothing is stored here; send the whole input")
    if body.maybe_flag("background"):
        body.refuse("background", "nothing is stored here; wait for the reply")


def _messages(body: Fields) -> list[dict[str, Any]]:
    instructions = body.maybe_text("instructions")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given := body.get("input"), str):
        messages.append({"role": "user", "content": given})
    else:
        messages += read_history(body.maybe_objects("input") or [])
    if not messages:
        body.refuse("input", "give a text, or a list of items with at least one")
    return messages


class _Offer:
    """The tools that the model is offered, all as functions."""

    def __init__(self) -> None:
        self.tools: list[dict[str, Any]] = []
        self.custom_tools: set[str] = set()
        self.namespaces: set[str] = set()
        self.ignored_params: list[str] = []

    def add_all(self, tools: list[Fields], namespace: str | None = None) -> None:
        for tool in tools:
            kind = tool.text("type")
            if kind == "function":
                self._add_function(tool, joined_name(namespace, tool.name()))
            elif kind == "custom":
                self._add_custom(tool, joined_name(namespace, tool.name()))
            elif kind == "namespace" and namespace is None:
                self.namespaces.add(tool.name())
                self.add_all(tool.objects("tools"), tool.name())
            else:
                self.ignored_params.append(f"tools: {ascii(kind)[:80]} is run by OpenAI; not offered")

    def _add_function(self, tool: Fields, name: str) -> None:
        self.ignored_params += check_function(tool)
        function = tool.value | {"name": name}
        del function["type"]
        self.tools.append({"type": "function", "function": function})

    def _add_custom(self, tool: Fields, name: str) -> None:
        function, more = custom_tool_function(tool, name)
        self.tools.append(function)
        self.custom_tools.add(name)
        self.ignored_params += more


def _thinking(body: Fields, ignored_params: list[str]) -> bool | None:
    reasoning = body.maybe_object("reasoning")
    if reasoning is None:
        return None
    if (reasoning.maybe_text("summary") or reasoning.maybe_text("generate_summary")) is not None:
        ignored_params.append("reasoning.summary: the reasoning itself is given")
    thinking = read_effort(reasoning, "effort", ignored_params)
    ignored_params += reasoning.ignored()
    return thinking


def _output_schema(body: Fields, ignored_params: list[str]) -> bool:
    text = body.maybe_object("text")
    if text is None:
        return False
    form = text.maybe_object("format")
    ignored_params += text.ignored()
    if form is None or form.text("type") == "text":
        return False
    ignored_params.append("text.format: not enforced")
    return True


def _ignored_params(body: Fields) -> list[str]:
    ignored = []
    if body.maybe_one_of("truncation", "auto", "disabled") == "auto":
        ignored.append("truncation: a prompt that is too long ends the reply")
    included = body.maybe_texts("include") or []
    ignored += [f"include {ascii(one)[:80]}: not given" for one in included if one not in _INCLUDED][:8]
    body.skip(*_HARMLESS)
    return ignored + body.ignored()
