"""Arithmetic with a calculator on offer: call it, wait, read what it says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from training.dialogue import Call, Dialogue, Scene, Tool, calls, says, tool, user
from training.manner import Manner
from training.reply import Attempt, last_integer
from training.skills.arithmetic import Sum, ask
from training.split import Split, draw

DESCRIPTIONS = [
    "Evaluate an arithmetic expression.",
    "Compute the value of a mathematical expression and return the result.",
    "A calculator for + - * / on numbers.",
    "Does arithmetic. Use it for every computation.",
    "Calculate the result of an expression.",
]
NAMES = ["calculator"] * 4 + ["calc", "calculate", "math", "evaluate", "compute", "math_eval", "Calculator"]
EXAMPLES = ["For example 12 * 7", "The expression", "An expression like 3 + 4"]
CALCULATOR: Tool = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example 12 * 7"}},
            "required": ["expression"],
        },
    },
}


@dataclass(frozen=True)
class Machine:
    """A calculator as one agent or another offers it."""

    spec: Tool
    by_operands: bool

    @property
    def name(self) -> str:
        return str(self.spec["function"]["name"])

    def call(self, problem: Sum) -> Call:
        properties = list(self.spec["function"]["parameters"]["properties"])
        values: list[Any] = [problem.a, problem.op, problem.b] if self.by_operands else [str(problem)]
        if self.by_operands and properties[0].startswith("op"):
            values = [problem.op, problem.a, problem.b]
        return Call(self.name, dict(zip(properties, values, strict=True)))


def big_sum(rng: Random) -> Sum:
    """Sums of up to five digits, too hard to do without the machine."""
    op = rng.choice("++--***/")
    high = 10 ** rng.randint(2, 5) - 1
    if op == "*":
        return Sum(rng.randint(2, min(high, 9999)), op, rng.randint(2, 999))
    if op == "/":
        b = rng.randint(2, 99)
        return Sum(b * rng.randint(2, 999), op, b)
    a = rng.randint(2, high)
    return Sum(a, op, rng.randint(1, a))


def any_machine(rng: Random) -> Machine:
    """Mostly the plain `calculator`, sometimes another name or another schema."""
    if rng.random() < 0.4:
        return Machine(CALCULATOR, by_operands=False)
    name = rng.choice(NAMES)
    by_operands = rng.random() < 0.3
    properties: dict[str, dict[str, Any]]
    if by_operands:
        numbers = rng.choice([("a", "b"), ("x", "y"), ("left", "right"), ("first", "second")])
        kind = rng.choice(["number", "integer"])
        signs = {"type": "string", "enum": ["+", "-", "*", "/"]}
        operator = {"operator" if rng.random() < 0.5 else "op": signs}
        first, second = ({number: {"type": kind}} for number in numbers)
        properties = {**first, **operator, **second} if rng.random() < 0.6 else {**operator, **first, **second}
    else:
        key = rng.choice(["expression"] * 4 + ["expr", "input", "formula", "query"])
        schema: dict[str, Any] = {"type": "string"}
        if rng.random() < 0.6:
            schema["description"] = rng.choice(EXAMPLES)
        properties = {key: schema}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    spec = {"name": name, "description": rng.choice(DESCRIPTIONS), "parameters": parameters}
    return Machine({"type": "function", "function": spec}, by_operands)


def machine_says(rng: Random, problem: Sum) -> str:
    """The result, as tools word it."""
    value = problem.answer
    return rng.choice(
        [str(value)] * 4
        + [
            json.dumps({"result": value}),
            json.dumps({"value": value, "ok": True}),
            f"{problem} = {value}",
            f"= {value}",
            f"Result: {value}",
            f"The result is {value}.",
        ]
    )


def report(rng: Random, problem: Sum, value: int) -> str:
    """The answer after the machine has spoken."""
    form = rng.random()
    if form < 0.6:
        return str(value)
    return f"{problem} = {value}" if form < 0.8 else f"The answer is {value}."


def scene(rng: Random, split: Split, manner: Manner) -> Scene:
    """Question, call, result, answer; now and then a sloppy answer without the call, or a failing tool."""
    problem = draw(rng, split, big_sum)
    machine = any_machine(rng)
    question = user(ask(rng, problem) + rng.choice([""] * 5 + [" Use the calculator.", " Use your tool."]))
    if rng.random() < 0.1:
        guess = max(0, problem.answer + rng.randint(-50, 50))
        lazy = says(str(guess), "I can do this without the tool." if manner.thinking_on else None)
        return Scene((question, lazy), (machine.spec,), frozenset({"calculator"}))
    call = calls(
        machine.call(problem),
        content=rng.choice([""] * 7 + ["Let me compute that.", "I will use the calculator."]),
        thinking=f"I use {machine.name} for {problem}." if manner.thinking_on else None,
    )
    final = says(
        report(rng, problem, problem.answer),
        f"The tool says {problem.answer}." if manner.thinking_on else None,
    )
    middle = [call, tool(machine_says(rng, problem))]
    if rng.random() < 0.07:
        trouble = tool(rng.choice(["error: timeout", "Error: busy, try again", '{"error": "temporary failure"}']))
        again = calls(machine.call(problem), thinking="The tool failed, I try again." if manner.thinking_on else None)
        middle = [call, trouble, again, middle[1]]
    return Scene((question, *middle, final), (machine.spec,), frozenset({"calculator"}))


def attempt(rng: Random, split: Split, *, thinking_on: bool) -> Attempt:
    """Reward 1 if the tool was called by its schema with the right sum and the final number is its result."""
    problem = draw(rng, split, big_sum)
    dialogue = Dialogue((user(ask(rng, problem)),), (CALCULATOR,), thinking_on)
    reply = yield dialogue
    wanted = Call("calculator", {"expression": str(problem)})
    if not (reply.ended and reply.well_formed and reply.calls == (wanted,)):
        return 0.0
    heard = (*dialogue.messages, reply.as_message(), tool(machine_says(rng, problem)))
    final = yield Dialogue(heard, dialogue.tools, thinking_on)
    return float(final.ended and not final.calls and last_integer(final.content) == problem.answer)
