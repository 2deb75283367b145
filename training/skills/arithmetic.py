"""Short arithmetic answered directly, with a line of thinking where thinking is on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from training.dialogue import Dialogue, Scene, says, user
from training.manner import Manner
from training.reply import Attempt, last_integer
from training.split import Split, draw
from training.words import COUNTED, NAMES

COMPLAINTS = ["That is wrong. Try again.", "No.", "Not correct, once more.", "Are you sure? Try again."]
WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


@dataclass(frozen=True)
class Sum:
    """a op b with a whole, not negative answer."""

    a: int
    op: str
    b: int

    def key(self) -> tuple[object, ...]:
        swaps = self.op in "+*" and self.a > self.b
        return ("sum", self.b, self.op, self.a) if swaps else ("sum", self.a, self.op, self.b)

    @property
    def answer(self) -> int:
        return {
            "+": self.a + self.b,
            "-": self.a - self.b,
            "*": self.a * self.b,
            "/": self.a // self.b,
        }[self.op]

    def __str__(self) -> str:
        return f"{self.a} {self.op} {self.b}"


def any_sum(rng: Random) -> Sum:
    """Easy and hard ones mixed, so that the model is right about half of the time."""
    kind = rng.random()
    if kind < 0.1:
        return Sum(rng.randint(2, 99), "+", rng.randint(2, 99))
    if kind < 0.2:
        a = rng.randint(2, 99)
        return Sum(a, "-", rng.randint(1, a))
    if kind < 0.3:
        return Sum(rng.randint(100, 999), "+", rng.randint(100, 999))
    if kind < 0.4:
        a = rng.randint(100, 999)
        return Sum(a, "-", rng.randint(10, a))
    if kind < 0.5:
        return Sum(rng.randint(2, 99), "*", rng.randint(2, 9))
    if kind < 0.6:
        return Sum(rng.randint(100, 999), "*", rng.randint(2, 9))
    if kind < 0.9:
        return Sum(rng.randint(11, 99), "*", rng.randint(11, 99))
    b = rng.randint(2, 12)
    return Sum(b * rng.randint(2, 99), "/", b)


def ask(rng: Random, problem: Sum) -> str:
    """The question, in one of many wordings."""
    a, op, b = problem.a, problem.op, problem.b
    tight = f"{a}{op}{b}" if rng.random() < 0.15 else str(problem)
    forms = [
        f"What is {tight}?",
        f"What is {tight}?",
        f"what is {tight}",
        f"What's {tight}?",
        f"Compute {tight}.",
        f"Calculate {tight}.",
        f"How much is {a} {WORDS[op]} {b}?",
        f"What is {a} {WORDS[op]} {b}?",
        f"{tight} = ?",
        f"{tight} =",
        f"{tight}",
        f"Solve: {tight}",
        f"Please work out {tight}.",
        f"Can you tell me what {tight} is?",
        f"Give me the result of {tight}.",
        f"Question: {tight}?",
        _story(rng, problem),
    ]
    return rng.choice(forms)


def think(problem: Sum, *, long_division: bool) -> str:
    """The working, short; it ends with the answer."""
    a, op, b = problem.a, problem.op, problem.b
    tens, ones = b - b % 10, b % 10
    if op == "+" and tens and ones:
        return f"{a} + {tens} = {a + tens}, {a + tens} + {ones} = {a + b}."
    if op == "-" and tens and ones:
        return f"{a} - {tens} = {a - tens}, {a - tens} - {ones} = {a - b}."
    if op == "*" and tens and ones:
        high, low = a * tens, a * ones
        return f"{a} * {tens} = {high}, {a} * {ones} = {low}, {high} + {low} = {a * b}."
    if op == "*" and a > 9:
        rest = a % 100 if a > 99 else a % 10
        high, low = (a - rest) * b, rest * b
        return f"{a - rest} * {b} = {high}, {rest} * {b} = {low}, {high} + {low} = {a * b}."
    if op == "/" and not long_division:
        return f"{b} * {problem.answer} = {a}, so {problem.answer}."
    if op == "/" and problem.answer > 9 and problem.answer % 10:
        tens, ones = problem.answer - problem.answer % 10, problem.answer % 10
        left = a - b * tens
        split = f"{b} * {tens} = {b * tens}, {a} - {b * tens} = {left}, {left} / {b} = {ones}"
        return f"{split}, {tens} + {ones} = {tens + ones}."
    return f"{problem} = {problem.answer}."


def answer(rng: Random, problem: Sum, value: int) -> str:
    """The answer, mostly as a bare number."""
    form = rng.random()
    if form < 0.75:
        return str(value)
    return f"{problem} = {value}" if form < 0.87 else f"The answer is {value}."


def slip(rng: Random, value: int) -> int:
    """The number with one digit wrong."""
    digits = str(value)
    place = rng.randrange(len(digits))
    wrong = rng.choice([digit for digit in "123456789" if digit != digits[place]])
    return int(digits[:place] + wrong + digits[place + 1 :])


def scene(rng: Random, split: Split, manner: Manner) -> Scene:
    """One question and its answer, sometimes after a wrong first attempt."""
    problem = draw(rng, split, any_sum)
    bare = rng.random() < 0.25
    question = ask(rng, problem)
    if bare:
        question += rng.choice([" Answer with the number only.", " Just the number.", "\nReply with a single number."])
    slips = manner.slip_share > 0 and rng.random() < manner.slip_share
    value = slip(rng, problem.answer) if slips else problem.answer
    thinking = think(problem, long_division=manner.long_division) if manner.thinking_on else None
    if thinking is not None and slips:
        thinking = thinking.removesuffix(f"{problem.answer}.") + f"{value}."
    reply = says(str(value) if bare else answer(rng, problem, value), thinking)
    if rng.random() < 0.08:
        wrong = str(max(0, problem.answer + rng.choice([-10, -2, -1, 1, 2, 10])))
        complaint = rng.choice(COMPLAINTS)
        first = says(wrong, "I will guess." if manner.thinking_on else None, trained=False)
        return Scene((user(question), first, user(complaint), reply))
    return Scene((user(question), reply))


def attempt(rng: Random, split: Split, *, thinking_on: bool, make: Callable[[Random], Sum] = any_sum) -> Attempt:
    """Reward 1 for the right number at the end of the reply."""
    problem = draw(rng, split, make)
    reply = yield Dialogue((user(ask(rng, problem)),), thinking_on=thinking_on)
    return float(reply.ended and last_integer(reply.content) == problem.answer)


def _story(rng: Random, problem: Sum) -> str:
    a, op, b = problem.a, problem.op, problem.b
    who, things = rng.choice(NAMES), rng.choice(COUNTED)
    if op == "+":
        return f"{who} has {a} {things} and gets {b} more. How many {things} does {who} have now?"
    if op == "-":
        return f"{who} has {a} {things} and gives away {b}. How many {things} are left?"
    if op == "*":
        return f"There are {a} boxes with {b} {things} each. How many {things} are there?"
    return f"{who} shares {a} {things} equally among {b} friends. How many {things} does each get?"
