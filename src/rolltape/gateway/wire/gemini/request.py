"""Parse a request of the Gemini API. The model and whether to stream are in its path, and the form of a
stream is in its query.

Google's JSON allows camelCase and snake_case names; both are read, and errors use camelCase. It also allows a single
object in place of a list, and the values of `mode` in upper or lower case, as in its own examples.
"""

from collections.abc import Mapping
from typing import Any

from rolltape.errors import BadRequest
from rolltape.gateway.request import ChatRequest, Effort, OutputSchema, SamplingParams, TokenDetails, ToolChoice
from rolltape.gateway.wire.fields import Fields, function_tool, printable, read_body
from rolltape.gateway.wire.gemini.contents import is_models, read_contents

STREAMING = "streamGenerateContent"
_MOST_LIKELY = 20  # tokens beside a sampled one, the API's limit
_MOST_CANDIDATES = 8  # Google's limit
# Fields about Google's billing, filters and logs, which do not change a reply.
_WITHOUT_EFFECT = ("safetySettings", "serviceTier", "store")
_FREE_FORM = frozenset(
    {"args", "default", "example", "labels", "parametersJsonSchema", "partMetadata", "response", "responseJsonSchema"}
)
_NAMED_BY_CLIENT = frozenset({"properties", "defs"})
_LISTS = frozenset({"contents", "parts", "tools", "functionDeclarations"})
_MODES = {"MODE_UNSPECIFIED": "auto", "AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
# Of the API's schemas, a dialect of OpenAPI's.
_RENAMED_KEYWORDS = {"defs": "$defs", "ref": "$ref"}
_NAMED_SCHEMAS = frozenset({"properties", "defs", "$defs"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_DROPPED_KEYWORDS = frozenset({"nullable", "propertyOrdering"})  # expressed in other ways
_UNSPECIFIED = "TYPE_UNSPECIFIED"

Tools = list[dict[str, Any]]


def read_request(body: bytes, path: Mapping[str, str]) -> ChatRequest:
    """A request for a reply."""
    fields, repaired = _read_body(body)
    request = _request(fields, path, repaired)
    last = fields.objects("contents")[-1]
    if is_models(last):
        raise BadRequest(f"{last.path} is the model's: a reply cannot be begun for it; end with a content of the user")
    return request


def read_counting(body: bytes, path: Mapping[str, str]) -> ChatRequest:
    """A request for the number of tokens of a prompt: its contents, or a whole request for a reply."""
    fields, repaired = _read_body(body)
    return _request(fields.maybe_object("generateContentRequest") or fields, path, repaired)


def _read_body(body: bytes) -> tuple[Fields, bool]:
    fields, repaired = read_body(body)
    return Fields(_in_camel_case(fields.value), ""), repaired


def _in_camel_case(value: Any) -> Any:
    """A body with camelCase names and proper lists; names chosen by clients are kept."""
    if isinstance(value, list):
        return [_in_camel_case(item) if isinstance(item, dict | list) else item for item in value]
    read: dict[str, Any] = {}
    for given, item in value.items():
        name = _camel(given) if "_" in given else given
        if not isinstance(item, dict | list) or name in _FREE_FORM:
            read[name] = item
        elif name in _NAMED_BY_CLIENT and isinstance(item, dict):
            read[name] = dict(zip(item, _in_camel_case(list(item.values())), strict=True))
        else:
            inner = _in_camel_case(item)
            read[name] = [inner] if name in _LISTS and isinstance(item, dict) else inner
    return read


def _camel(name: str) -> str:
    head, *more = name.split("_")
    return head + "".join(word[:1].upper() + word[1:] for word in more) if head else name


def _request(fields: Fields, path: Mapping[str, str], repaired: bool) -> ChatRequest:
    if fields.get("cachedContent") is not None:
        fields.refuse("cachedContent", "nothing is cached here by name; send all of it in contents")
    config = fields.maybe_object("generationConfig") or Fields({}, "generationConfig", fields)
    labels = fields.maybe_object("labels")
    model = path.get("model") or fields.name("model")
    fields.skip("model")
    messages = read_contents(fields)
    tools = _tools(fields)
    names = [tool["function"]["name"] for tool in tools]
    choice, strict = _tool_choice(fields, names)
    count = config.maybe_whole("candidateCount", least=0, most=_MOST_CANDIDATES) or 1
    logprobs = bool(config.maybe_flag("responseLogprobs"))
    likely = config.maybe_whole("logprobs", least=0, most=_MOST_LIKELY) or 0
    details = TokenDetails(logprobs=logprobs, top_logprobs=likely if logprobs else 0)
    sampling = _sampling(config)
    thinking, effort = _thinking(config)
    output_schema = _output_schema(config)
    _ignore_rest(config)
    is_streamed = path.get("method") == STREAMING
    return ChatRequest(
        api="gemini",
        model=model.removeprefix("models/"),
        messages=messages,
        tools=tools or None,
        tool_choice=choice,
        strict_tools=frozenset(names) if strict else frozenset(),
        sampling=sampling,
        n=count,
        token_details=details,
        stream=is_streamed,
        in_array=is_streamed and path.get("alt") != "sse",
        thinking=thinking,
        effort=effort,
        output_schema=output_schema,
        media=tuple(fields.media),
        metadata=None if labels is None else labels.value,
        repaired=repaired,
        ignored_params=fields.all_ignored(*_WITHOUT_EFFECT),  # last, since it names the unread fields
    )


def _sampling(config: Fields) -> SamplingParams:
    return SamplingParams(
        temperature=config.maybe_number("temperature", least=0),
        top_p=config.maybe_number("topP", least=0, most=1),
        top_k=config.maybe_whole("topK", least=0) or None,  # 0: all
        seed=config.maybe_whole("seed"),
        max_tokens=config.maybe_whole("maxOutputTokens", least=1),
        stop=config.maybe_stops("stopSequences"),
        presence_penalty=config.maybe_number("presencePenalty", least=-2, most=2),
        frequency_penalty=config.maybe_number("frequencyPenalty", least=-2, most=2),
    )


def _tools(fields: Fields) -> Tools:
    """The functions that the client declares. Tools that Google runs are not offered."""
    tools: dict[str, dict[str, Any]] = {}
    for tool in fields.maybe_objects("tools") or ():
        for declared in tool.maybe_objects("functionDeclarations") or ():
            name = declared.name()
            if name in tools:
                declared.refuse("name", "there is another function of that name; give each its own")
            tools[name] = _function(declared, name)
        for other in tool.unread()[:8]:
            fields.ignore(f"tools: {printable(other)} is not offered here, functions are")
    return list(tools.values())


def _function(declared: Fields, name: str) -> dict[str, Any]:
    schema = declared.maybe_object("parametersJsonSchema")
    older = declared.maybe_object("parameters")
    parameters = schema.value if schema is not None else None if older is None else to_json_schema(older.value)
    for extra in ("response", "responseJsonSchema"):
        if declared.get(extra) is not None:
            declared.ignore(f"tools: {extra} is not shown to the model")
    if declared.maybe_text("behavior") == "NON_BLOCKING":
        declared.ignore("tools: behavior is not honored; the model waits for each result")
    return function_tool(name, declared.maybe_text("description"), parameters)


def _tool_choice(fields: Fields, names: list[str]) -> tuple[ToolChoice, bool]:
    """Whether the model may call functions, and whether their arguments must follow their schema."""
    holder = fields.maybe_object("toolConfig")
    config = None if holder is None else holder.maybe_object("functionCallingConfig")
    if holder is not None:
        holder.ignore_unread()
    if config is None:
        return ToolChoice(), False
    mode = (config.maybe_text("mode") or "AUTO").upper()
    if mode not in _MODES:
        config.refuse("mode", f"known are {', '.join(_MODES)}")
    allowed = config.maybe_texts("allowedFunctionNames") or []
    if unknown := [name for name in allowed if name not in names]:
        config.refuse("allowedFunctionNames", f"no function {unknown[0]!r} is declared; name those that are")
    if mode == "ANY" and not names:
        config.refuse("mode", "no functions are declared; give some, or leave it out")
    config.ignore_unread()
    if mode == "ANY" and len(allowed) == 1:
        return ToolChoice("required", allowed[0]), False
    if allowed and set(allowed) < set(names):
        # The tools are part of the prompt: other tools for a single turn would break the prefix.
        config.ignore(f"{config.at('allowedFunctionNames')}: all functions stay offered")
    return ToolChoice(_MODES[mode]), mode == "VALIDATED"


def _thinking(config: Fields) -> tuple[bool | None, Effort | None]:
    """Whether to think at all, and how much."""
    thinking = config.maybe_object("thinkingConfig")
    if thinking is None:
        return None, None
    if thinking.maybe_flag("includeThoughts") is False:
        thinking.ignore(f"{thinking.at('includeThoughts')}: thoughts are shown in full")
    budget = thinking.maybe_whole("thinkingBudget", least=-1)
    level = thinking.maybe_text("thinkingLevel")
    thinking.ignore_unread()
    if budget == 0:
        return False, None
    if budget is not None and budget > 0:
        thinking.ignore(f"{thinking.at('thinkingBudget')}: thinking is limited only by maxOutputTokens")
    effort = None if level is None else Effort(thinking.at("thinkingLevel"), level.lower())
    return None if budget is None and level is None else True, effort


def _output_schema(config: Fields) -> OutputSchema | None:
    """The schema that the reply must follow, under its newer or its older name."""
    kind = config.maybe_text("responseMimeType")
    newer, older = config.maybe_object("responseJsonSchema"), config.maybe_object("responseSchema")
    if kind == "application/json":
        if newer is not None:
            return OutputSchema(newer.path, newer.value)
        if older is not None:
            return OutputSchema(older.path, to_json_schema(older.value))
        return OutputSchema(config.at("responseMimeType"), {"type": ["object", "array"]})
    if kind not in (None, "text/plain"):
        config.ignore(f"{config.at('responseMimeType')} '{printable(kind)}': not known here; the reply is free")
    elif unused := newer or older:
        config.ignore(f"{unused.path}: ignored without the responseMimeType application/json")
    return None


def _ignore_rest(config: Fields) -> None:
    modalities = config.maybe_texts("responseModalities")
    if modalities and "TEXT" not in modalities:
        config.refuse("responseModalities", "the model writes text only; ask for TEXT")
    if modalities and set(modalities) != {"TEXT"}:
        config.ignore(f"{config.at('responseModalities')}: the model writes text only")
    config.ignore_unread()


def to_json_schema(schema: object) -> Any:
    """A schema of the Gemini API, which is of OpenAPI's kind, as JSON schema. Unknown or malformed parts are kept.

    Example:

        to_json_schema({"type": "STRING", "nullable": True})  # {"type": ["string", "null"]}
    """
    if not isinstance(schema, dict):
        return schema
    given = {name: value for name, value in schema.items() if value is not None}
    kept = {name: value for name, value in given.items() if name not in _DROPPED_KEYWORDS}
    read = {_RENAMED_KEYWORDS.get(name, name): _read_keyword(name, value) for name, value in kept.items()}
    if read.get("type") == _UNSPECIFIED.lower():
        del read["type"]
    if "example" in read:
        read["examples"] = [read.pop("example")]
    order, properties = given.get("propertyOrdering"), read.get("properties")
    if isinstance(order, list) and isinstance(properties, dict):
        first = [name for name in order if isinstance(name, str) and name in properties]
        read["properties"] = {name: properties[name] for name in [*first, *properties]}
    return _or_null(read) if given.get("nullable") is True else read


def _read_keyword(name: str, value: Any) -> Any:
    if name == "type" and isinstance(value, str):
        return value.lower()
    if name == "ref" and isinstance(value, str):
        return value.replace("#/defs/", "#/$defs/", 1)
    if name in _COUNTS and isinstance(value, str) and value.isdecimal():
        return int(value)  # Google's JSON writes 64-bit numbers as texts
    if name in _NAMED_SCHEMAS and isinstance(value, dict):
        return {key: to_json_schema(inner) for key, inner in value.items()}
    if name in ("items", "additionalProperties"):
        return to_json_schema(value)
    if name in ("anyOf", "prefixItems") and isinstance(value, list):
        return [to_json_schema(inner) for inner in value]
    return value


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that also allows null."""
    read = dict(schema)
    if isinstance(read.get("type"), str):
        read["type"] = [read["type"], "null"]
    if isinstance(read.get("enum"), list) and None not in read["enum"]:
        read["enum"] = [*read["enum"], None]
    if isinstance(read.get("anyOf"), list):
        read["anyOf"] = [*read["anyOf"], {"type": "null"}]
    return read
