"""Calling one of several offered tools by its name and schema, and reading what it gives back."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from training.dialogue import Call, Dialogue, Message, Scene, Tool, calls, says, tool, user
from training.manner import Manner
from training.reply import Attempt
from training.split import Split, side_of
from training.toolbox import Kit, any_kit, any_natural
from training.words import NOUNS, VERBS, code, handbook, phrase, sentence


@dataclass(frozen=True)
class Order:
    """A request, the tools on offer, and the call that it wants."""

    request: str
    tools: tuple[Tool, ...]
    call: Call


def any_order(rng: Random, split: Split, tools: int | None = None) -> Order:
    """A request for one tool among up to seven; some of the others resemble it."""
    others = rng.choice([0, 1, 1, 2, 2, 3, 4, 6]) if tools is None else tools - 1
    if rng.random() < 0.25:
        kit, arguments, request = _natural_request(rng, split)
    else:
        kit = any_kit(rng, split)
        arguments = {p.key: p.value(rng) for p in kit.parameters if p.required or rng.random() < 0.5}
        request = _request(rng, kit, arguments)
    kits = {kit.name: kit}
    while len(kits) <= others:
        other = any_kit(rng, split, _lookalike(rng, kit)) if rng.random() < 0.9 else any_natural(rng).kit
        kits.setdefault(other.name, other)
    offered = list(kits.values())
    rng.shuffle(offered)
    return Order(request, tuple(k.spec() for k in offered), Call(kit.name, arguments))


def scene(rng: Random, split: Split, manner: Manner) -> Scene:
    """Request, call, result, a short closing; some first calls are wrong and the tool says so."""
    order = any_order(rng, split)
    call, name = order.call, order.call.name
    if rng.random() < 0.04 and len(order.tools) > 1:
        rest = tuple(spec for spec in order.tools if spec["function"]["name"] != name)
        refusal = says("I have no tool for that.", "None of the tools does this." if manner.thinking_on else None)
        # Asking for a tool by its own name would give away that it once was there.
        if name not in order.request:
            return Scene((user(order.request), refusal), rest)
    messages = [user(order.request)]
    thought = f"I call {name}." if manner.thinking_on else None
    lead = rng.choice([""] * 9 + ["I will do that.", "One moment."])
    mistake = _mistake(rng, order) if rng.random() < 0.12 else None
    if mistake is not None:
        wrong, complaint = mistake
        messages += [calls(wrong, thinking=f"I call {wrong.name}." if manner.thinking_on else None), tool(complaint)]
        thought = f"That was wrong. I call {name}." if manner.thinking_on else None
        lead = ""
    messages.append(calls(call, content=lead, thinking=thought))
    result, closing = any_result(rng)
    messages += [tool(result), says(closing, "The tool has answered." if manner.thinking_on else None)]
    return Scene(tuple(messages), order.tools)


def double_scene(rng: Random, split: Split, manner: Manner) -> Scene:
    """Two requests in one message, called together."""
    first, second = any_order(rng, split), any_order(rng, split)
    specs = {spec["function"]["name"]: spec for spec in (*first.tools, *second.tools)}
    if len(specs) < len(first.tools) + len(second.tools):
        return scene(rng, split, manner)
    request = f"{first.request}{rng.choice([' Also: ', ' And then: ', chr(10)])}{second.request}"
    thinking = f"I call {first.call.name} and {second.call.name}." if manner.thinking_on else None
    answers = [tool(any_result(rng)[0]) for _ in range(2)]
    closing = says("Both are done.", "Both tools have answered." if manner.thinking_on else None)
    return Scene(
        (user(request), calls(first.call, second.call, thinking=thinking), *answers, closing), tuple(specs.values())
    )


def any_result(rng: Random) -> tuple[str, str]:
    """What a tool gives back, and what is said about it."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(["ok", "done", "success", '{"status": "ok"}', "", "(no output)"]), "Done."
    if kind < 0.5:
        value: Any = rng.choice([code(rng), rng.randint(0, 999), rng.choice(NOUNS)])
        key = rng.choice(["result", "value", "id", "status", rng.choice(NOUNS)])
        return json.dumps({key: value}), f"The {key} is {value}."
    if kind < 0.75:
        text = rng.choice([phrase(rng), sentence(rng), code(rng)])
        return text, f"The tool says: {text}"
    if kind < 0.85:
        trouble = rng.choice(["not found", "permission denied", "timeout", f"unknown {rng.choice(NOUNS)}"])
        return rng.choice([f"error: {trouble}", f"Error: {trouble}"]), f"The tool failed: {trouble}."
    return handbook(rng, rng.randint(1, 4)), "Done."


def attempt(rng: Random, split: Split, *, thinking_on: bool, tools: int = 4, system: str | None = None) -> Attempt:
    """Reward 1 for exactly the wanted call among `tools` tools."""
    order = any_order(rng, split, tools)
    messages = [user(order.request)]
    if system is not None:
        messages.insert(0, Message("system", system))
    reply = yield Dialogue(tuple(messages), order.tools, thinking_on)
    return float(reply.ended and reply.well_formed and reply.calls == (order.call,))


def _natural_request(rng: Random, split: Split) -> tuple[Kit, dict[str, Any], str]:
    while True:
        natural = any_natural(rng)
        arguments = {p.key: p.value(rng) for p in natural.kit.parameters}
        if side_of("natural", natural.kit.name, tuple(arguments.values())) is split:
            break
    request = rng.choice(natural.wordings)
    for key, value in arguments.items():
        request = request.replace(f"{{{key}}}", value)
    return natural.kit, arguments, request


def _lookalike(rng: Random, kit: Kit) -> tuple[str, str] | None:
    if not kit.deed or rng.random() < 0.6:
        return None
    verb, _, noun = kit.deed.partition(" the ")
    return (verb, rng.choice(NOUNS)) if rng.random() < 0.5 else (rng.choice(VERBS), noun)


def _request(rng: Random, kit: Kit, arguments: dict[str, Any]) -> str:
    deed = kit.deed
    opening = rng.choice(
        [
            deed.capitalize(),
            deed.capitalize(),
            f"Please {deed}",
            f"I need you to {deed}",
            f"Can you {deed}",
            f"Call {kit.name}",
            f"Use the {kit.name} tool",
            f"Use {kit.name} to {deed}",
            f"{kit.name}",
        ]
    )
    if not arguments:
        return opening + rng.choice([".", "", "!"])
    given = list(arguments.items())
    if rng.random() < 0.3:
        rng.shuffle(given)
    style = rng.randrange(6)
    words = [(key, _spoken(rng, value)) for key, value in given]
    if style == 0:
        return f"{opening} with {' and '.join(f'{key} {value}' for key, value in words)}."
    if style == 1:
        return f"{opening} ({', '.join(f'{key}: {value}' for key, value in words)})"
    if style == 2:
        return f"{opening} with {', '.join(f'{key}={value}' for key, value in words)}"
    if style == 3:
        return f"{opening}. {' '.join(f'The {key} is {value}.' for key, value in words)}"
    if style == 4:
        return f"{opening}:\n" + "\n".join(f"- {key}: {value}" for key, value in words)
    return f"{opening}, {' and '.join(f'set {key} to {value}' for key, value in words)}."


def _spoken(rng: Random, value: Any) -> str:
    if isinstance(value, bool):
        return rng.choice(["true", "yes"] if value else ["false", "no"])
    if isinstance(value, str):
        bare = " " not in value and not value.endswith((".", "!", ";")) and rng.random() < 0.6
        return value if bare else f'"{value}"'
    return str(value)


def _mistake(rng: Random, order: Order) -> tuple[Call, str] | None:
    call = order.call
    others = [spec["function"]["name"] for spec in order.tools if spec["function"]["name"] != call.name]
    kind = rng.random()
    if kind < 0.4 and call.arguments:
        lost = rng.choice(list(call.arguments))
        left = {key: value for key, value in call.arguments.items() if key != lost}
        complaint = rng.choice(["error: {} is missing", "Error: missing argument {}"])
        return replace(call, arguments=left), complaint.format(lost)
    if kind < 0.7 and others:
        wrong = replace(call, name=rng.choice(others))
        return wrong, rng.choice(["error: wrong tool", "Error: invalid arguments for this tool"])
    slip = call.name.replace("_", "") if "_" in call.name else call.name + "s"
    return replace(call, name=slip), f"error: unknown tool {slip}"
