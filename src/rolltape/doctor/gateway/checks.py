"""The conformance kit of gateways: rules that agents need, over the APIs that a gateway serves, each as a check.

Checks use only an address and a key, so any OpenAI- or Anthropic-compatible gateway can be tested.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import msgspec

from rolltape.doctor.gateway.apis import APIS, CHAT, TIMEOUT_S, Api, ApiReply, GatewayClient, gateway_client
from rolltape.doctor.results import CheckResult, fault, named, note, ok, warning
from rolltape.records.turn import common_length
from rolltape.records.wording import plural

_ASKED = {"role": "user", "content": "What is 23 + 19? Answer with the number."}
_GO_ON = {"role": "user", "content": "And twice that?"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "calculate_sum",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
_NOT_SERVED = frozenset({404, 405, 501})

GatewayCheck = Callable[["GatewayProbe"], Awaitable[CheckResult | None]]


class GatewayProbe:
    """A gateway with the APIs that it serves, and a first reply in each."""

    def __init__(self, client: GatewayClient) -> None:
        self.client = client
        self.first: dict[Api, ApiReply] = {}  # by API, for served ones
        self.answers = True  # False if a request got no answer in time; then no more are sent


async def check_gateway(url: str, *, key: str | None = None, model: str | None = None) -> AsyncIterator[CheckResult]:
    """Run the checks of a gateway one by one.

    Example:

        async for result in check_gateway("http://127.0.0.1:8400", key=session_key):
            print(result.check, result.verdict, result.measured)
    """
    async with gateway_client(url, key, model) as client:
        probe = GatewayProbe(client)
        for name, check in GATEWAY_CHECKS.items():
            result = await _run(check, probe)
            if result is not None:
                yield msgspec.structs.replace(named(name, result), part="gateway")
            if not probe.first or not probe.answers:
                return


async def _run(check: GatewayCheck, probe: GatewayProbe) -> CheckResult | None:
    try:
        return await check(probe)
    except TimeoutError:
        probe.answers = False
        return fault(
            f"no answer in {TIMEOUT_S:g} s",
            "read the gateway's own log, and its engine's; the checks after this one were left out",
        )
    except aiohttp.ClientError as error:
        return fault(f"no answer: {str(error) or type(error).__name__}", "start the gateway, or correct --gateway")
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        return fault(f"an answer lacks what its API has: {error!r}", "compare its answers with the API's reference")


async def _apis(probe: GatewayProbe) -> CheckResult:
    """Which APIs are served. The model is the first of the gateway's list, unless one is given."""
    client = probe.client
    status, listed = await client.get("/v1/models")
    names = [one["id"] for one in listed.get("data", ())] if status == 200 and isinstance(listed, dict) else []
    client.model = client.model or (names[0] if names else "default")
    refused: dict[str, ApiReply] = {}
    for api in APIS:
        reply = await client.ask(api, [_ASKED])
        if reply.status == 200:
            probe.first[api] = reply
        elif reply.status not in _NOT_SERVED:
            refused[api.name] = reply
    served = ", ".join(api.name for api in probe.first)
    why = "; ".join(f"{name} answers {one.status}: {_message(one.body)}" for name, one in refused.items())
    if not probe.first:
        return fault(why or "neither chat, messages nor responses are served", "give its address, and --key")
    if refused:
        return warning(f"{served} for model {client.model}; {why}", "agents of that API will fail")
    return ok(f"{served} for model {client.model}", served=[api.name for api in probe.first])


async def _reply_ids(probe: GatewayProbe) -> CheckResult:
    """Whether each reply has a unique id: Claude Code merges replies with the same id."""
    again = {api: await probe.client.ask(api, [_ASKED, *probe.first[api].message, _GO_ON]) for api in probe.first}
    without = [api.name for api in probe.first if not probe.first[api].id]
    shared = [api.name for api in probe.first if probe.first[api].id and probe.first[api].id == again[api].id]
    if without or shared:
        what = f"{', '.join(shared or without)}: {'two replies share an id' if shared else 'replies have no id'}"
        return fault(what, "give every reply an id of its own; agents merge replies that share one")
    return ok(f"each reply has its own ({', '.join(api.name for api in probe.first)})")


async def _streaming(probe: GatewayProbe) -> CheckResult:
    broken: list[str] = []
    seen: list[str] = []
    for api in probe.first:
        reply = await probe.client.stream(api, [_ASKED])
        if reply.status != 200 or not reply.ended:
            broken.append(f"{api.name} ({reply.status if reply.status != 200 else 'without its last event'})")
        seen.append(f"{api.name} {plural(reply.events, 'piece')}")
    if broken:
        return fault(f"broken: {', '.join(broken)}", "agents take such a stream for a lost connection")
    return ok(f"{', '.join(seen)}, each with its last event")


async def _tool_calls(probe: GatewayProbe) -> CheckResult:
    """Whether a call is well-formed, and its result is accepted in the next request."""
    made: list[str] = []
    none: list[str] = []
    broken: list[str] = []
    for api in probe.first:
        question = [{"role": "user", "content": "Add 23 and 19 with the tool."}]
        fields = api.forced(_TOOL)
        reply = await probe.client.ask(api, question, **fields)
        if reply.status != 200 or not reply.calls:
            if reply.status == 200:
                none.append(api.name)
            else:
                broken.append(f"{api.name} ({reply.status}: {_message(reply.body)})")
            continue
        if not all(isinstance(_parse(call["arguments"]), dict) and call["id"] for call in reply.calls):
            broken.append(f"{api.name} (arguments {reply.calls[0]['arguments']!r})")
            continue
        results = [api.result(call, "42") for call in reply.calls]
        after = await probe.client.ask(api, [*question, *reply.message, *results], tools=fields["tools"])
        if after.status == 200:
            made.append(api.name)
        else:
            broken.append(f"{api.name} (result)")
    if broken:
        return fault(f"broken: {', '.join(broken)}", "agents cannot use tools over that API")
    if none:
        return note(
            f"no call though one was required: {', '.join(none)}",
            "use a model that calls tools, or an engine that holds replies to a form",
        )
    return ok(f"a required call, and a reply to its result: {', '.join(made)}")


async def _history(probe: GatewayProbe) -> CheckResult | None:
    """Whether the second prompt contains the first and its reply: by ids if available, else by counts."""
    if CHAT not in probe.first:
        return None
    ids = {"return_token_ids": True, "chat_template_kwargs": {"enable_thinking": False}}
    one = await probe.client.ask(CHAT, [_ASKED], **ids)
    if one.status != 200:
        return note(f"token ids cannot be requested ({one.status})", "without them re-tokenization cannot be detected")
    two = await probe.client.ask(CHAT, [_ASKED, *one.message, _GO_ON], **ids)
    held = _all_ids(one.body)
    later = two.body.get("prompt_token_ids") if isinstance(two.body, dict) else None
    if held is not None and later is not None:
        if later[: len(held)] == held:
            return ok(f"the second prompt begins with all {len(held)} ids of the first turn")
        return warning(
            f"the second prompt departs from the first turn at id {common_length(held, later)} of {len(held)}",
            "replies are tokenized again; a trainer that joins turns by text trains on ids that were not sampled",
        )
    if None in (one.prompt_tokens, one.completion_tokens, two.prompt_tokens):
        return note("neither token ids nor usage are returned", "have the gateway return token ids (return_token_ids)")
    least = (one.prompt_tokens or 0) + (one.completion_tokens or 0)
    measured = f"token ids are not returned; the second prompt has {two.prompt_tokens} tokens, the first turn {least}"
    if (two.prompt_tokens or 0) < least:
        return warning(measured, "a part of the history is left out or re-tokenized", cached=two.cached_tokens)
    return note(measured, "have the gateway return token ids (return_token_ids)")


def _all_ids(body: Any) -> list[int] | None:
    prompt, reply = body.get("prompt_token_ids"), body["choices"][0].get("token_ids")
    return None if prompt is None or reply is None else [*prompt, *reply]


async def _logprobs(probe: GatewayProbe) -> CheckResult | None:
    if CHAT not in probe.first:
        return None
    reply = await probe.client.ask(CHAT, [_ASKED], logprobs=True)
    given = (reply.body["choices"][0].get("logprobs") or {}).get("content") if reply.status == 200 else None
    if not given:
        return note(f"none are returned ({reply.status})", "a trainer must get them another way, such as from a tape")
    if reply.completion_tokens is not None and len(given) != reply.completion_tokens:
        return warning(
            f"{len(given)} logprobs for {reply.completion_tokens} sampled tokens",
            "some sampled tokens, such as the stop token, are left out",
        )
    return ok(f"one for each of {len(given)} sampled tokens")


async def _errors(probe: GatewayProbe) -> CheckResult:
    """Whether invalid requests are refused with a client error in JSON."""
    odd = []
    for api in probe.first:
        for what, body in (("broken JSON", b'{"model": '), ("no messages", {"model": probe.client.model})):
            status, answer = await probe.client.post(api.path, body)
            if not 400 <= status < 500 or not isinstance(answer, dict):
                odd.append(f"{api.name}: {what} is answered with {status}")
    if odd:
        return warning("; ".join(odd), "agents retry a request unless it is refused with 4xx and a JSON body")
    return ok("broken and empty requests are refused with 4xx in JSON")


async def _keys(probe: GatewayProbe) -> CheckResult | None:
    if probe.client.key is None:
        return note("no key was given, and none was needed", "if it listens beyond loopback, anyone can use it")
    api = next(iter(probe.first))
    wrong = {"Authorization": "Bearer wrong", "x-api-key": "wrong"}
    status, _ = await probe.client.post(api.path, api.ask(probe.client.model, [_ASKED]), headers=wrong)
    if status in (401, 403):
        return ok(f"a wrong key is refused ({status})")
    return warning(f"a wrong key is answered with {status}", "anyone who can reach the gateway can use it")


async def _at_once(probe: GatewayProbe) -> CheckResult:
    """Whether two simultaneous requests both get a reply, as sub-agents need."""
    api = next(iter(probe.first))
    asks = [probe.client.ask(api, [{"role": "user", "content": f"Say {word}."}]) for word in ("yes", "no")]
    replies = await asyncio.gather(*asks)
    if all(reply.status == 200 for reply in replies):
        return ok("two requests at the same time both got a reply")
    return warning(f"two requests at the same time: {[one.status for one in replies]}", "sub-agents will fail")


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:120]


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


GATEWAY_CHECKS: dict[str, GatewayCheck] = {
    "apis": _apis,
    "reply ids": _reply_ids,
    "streaming": _streaming,
    "tool calls": _tool_calls,
    "history": _history,
    "logprobs": _logprobs,
    "at once": _at_once,
    "errors": _errors,
    "keys": _keys,
}
