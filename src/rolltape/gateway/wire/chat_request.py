"""Parse a Chat Completions request."""

from typing import Any

from rolltape.errors import BadRequest
from rolltape.gateway.exchange import Api, Ask, SamplingParams
from rolltape.gateway.wire.chat_history import read_messages
from rolltape.gateway.wire.fields import Fields, read_body
from rolltape.gateway.wire.openai import check_function, custom_tool_function, read_effort, read_tool_choice

# Of no effect on what the model does: bookkeeping, caching and speed at the provider.
_HARMLESS = (
    "metadata",
    "user",
    "safety_identifier",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "prediction",
)


def read_ask(raw: bytes) -> Ask:
    """The body of a request; raises BadRequest."""
    body, repaired = read_body(raw)
    _refuse_unservable(body)
    messages = read_messages(body)
    tools, custom_tools, ignored_params = _tools(body)
    choice, more = read_tool_choice(body, [tool["function"]["name"] for tool in tools or ()])
    ignored_params += more
    thinking = _thinking(body, ignored_params)
    output_schema = _output_schema(body, ignored_params)
    options = body.maybe_object("stream_options")
    return Ask(
        api=Api.CHAT,
        model=body.name("model"),
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.maybe_flag("parallel_tool_calls") is not False,
        sampling=_sampling(body),
        stream=body.maybe_flag("stream") or False,
        include_usage=options is not None and options.maybe_flag("include_usage") is True,
        thinking=thinking,
        custom_tools=custom_tools,
        # After all others, since it names the fields that nobody read.
        ignored_params=tuple(dict.fromkeys((*ignored_params, *_ignored_params(body)))),
        output_schema=output_schema,
        repaired=repaired,
    )


def _refuse_unservable(body: Fields) -> None:
    if (n := body.maybe_whole("n", least=1)) is not None and n > 1:
        body.refuse("n", "send one request for each reply")
    for legacy, now in (("functions", "tools"), ("function_call", "tool_choice")):
        if body.get(legacy) is not None:
            raise BadRequest(f"{legacy} was replaced by {now}; send that")
    if body.get("audio") is not None or "audio" in (body.maybe_texts("modalities") or ()):
        raise BadRequest("modalities: audio is not supported; ask for text")


def _tools(body: Fields) -> tuple[list[dict[str, Any]] | None, frozenset[str], list[str]]:
    """The tools as functions, which of them are custom, and what cannot be honored."""
    given = body.maybe_objects("tools")
    tools, custom_tools, ignored_params = [], set(), []
    for tool in given or ():
        kind = tool.text("type")
        if kind == "function":
            ignored_params += check_function(tool.object("function"))
            tools.append(tool.value)
        elif kind == "custom":
            custom = tool.object("custom")
            function, more = custom_tool_function(custom, custom.name())
            tools.append(function)
            custom_tools.add(custom.name())
            ignored_params += more
        else:
            tool.refuse("type", "known are function, custom")
    return tools or None, frozenset(custom_tools), ignored_params


def _sampling(body: Fields) -> SamplingParams:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else body.maybe_texts("stop")
    limits = [body.maybe_whole(name, least=1) for name in ("max_completion_tokens", "max_tokens")]
    return SamplingParams(
        temperature=body.maybe_number("temperature", least=0),
        top_p=body.maybe_number("top_p", least=0, most=1),
        top_k=body.maybe_whole("top_k", least=-1),
        min_p=body.maybe_number("min_p", least=0, most=1),
        seed=body.maybe_whole("seed"),
        max_tokens=next((limit for limit in limits if limit is not None), None),
        stop=tuple(one for one in stops if one) if stops else None,
        presence_penalty=body.maybe_number("presence_penalty", least=-2, most=2),
        frequency_penalty=body.maybe_number("frequency_penalty", least=-2, most=2),
        repetition_penalty=body.maybe_number("repetition_penalty", least=0),
    )


def _thinking(body: Fields, ignored_params: list[str]) -> bool | None:
    """Whether to think: what the template is told outright, else whether an effort is asked for."""
    by_effort = read_effort(body, "reasoning_effort", ignored_params)
    template = body.maybe_object("chat_template_kwargs")
    if template is None:
        return by_effort
    outright = template.maybe_flag("enable_thinking")
    ignored_params += template.ignored()
    return by_effort if outright is None else outright


def _output_schema(body: Fields, ignored_params: list[str]) -> bool:
    form = body.maybe_object("response_format")
    if form is None or form.text("type") == "text":
        return False
    ignored_params.append("response_format: not enforced")
    return True


def _ignored_params(body: Fields) -> list[str]:
    ignored = []
    if body.maybe_flag("logprobs") or body.maybe_whole("top_logprobs"):
        ignored.append("logprobs: recorded, and not sent back")
    if body.get("logit_bias"):
        ignored.append("logit_bias: ignored")
    body.skip(*_HARMLESS)
    return ignored + body.ignored()
