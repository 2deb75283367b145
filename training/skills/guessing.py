"""Guess the number over several turns, told only `higher` or `lower`."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from training.dialogue import Call, Dialogue, Message, Scene, Tool, calls, says, tool, user
from training.manner import Manner
from training.reply import Attempt, last_integer
from training.split import Split, draw

HIGHER = ["higher"] * 4 + ["Higher!", "Higher.", "Too low, go higher.", "It is higher.", "higher than that"]
LOWER = ["lower"] * 4 + ["Lower!", "Lower.", "Too high, go lower.", "It is lower.", "lower than that"]
TOOLS = [("guess", "number"), ("guess_number", "guess"), ("try_number", "value"), ("check", "number")]
HIGHS = (10, 20, 30, 50, 64, 100, 100, 100, 200, 500, 1000)


@dataclass(frozen=True)
class Secret:
    """A number from 1 to `high`."""

    high: int
    number: int

    def key(self) -> tuple[object, ...]:
        return ("secret", self.high, self.number)

    @property
    def fair_guesses(self) -> int:
        """What halving the range needs at most."""
        return self.high.bit_length()


def any_secret(rng: Random) -> Secret:
    """Ranges of ten up to a thousand."""
    high = rng.choice(HIGHS)
    return Secret(high, rng.randint(1, high))


def invitation(rng: Random, high: int) -> str:
    """How the game begins."""
    return rng.choice(
        [
            f"I am thinking of a number between 1 and {high}. Guess it. I will say higher or lower.",
            f"Guess my number from 1 to {high}.",
            f"Let's play guess the number. It is between 1 and {high}. Your guess?",
            f"I have a secret number between 1 and {high}. What is your first guess?",
            f"Find the number I picked (1-{high}). After each guess I answer higher, lower or correct.",
            f"Number guessing game: 1 to {high}. Reply with one number per turn.",
        ]
    )


def hint(rng: Random, guess: int, number: int) -> str:
    """The answer to a wrong guess."""
    return rng.choice(HIGHER if number > guess else LOWER)


def next_guess(rng: Random, low: int, high: int, *, wide: bool) -> int:
    """Near the middle of what is left, not always in it."""
    middle, spread = (low + high) // 2, (high - low) // (3 if wide else 8)
    return middle if rng.random() < 0.5 else rng.randint(middle - spread, middle + spread)


def guess_tool(rng: Random) -> Tool:
    """The same game played through a tool."""
    name, key = rng.choice(TOOLS)
    spec = {
        "name": name,
        "description": rng.choice(["Guess the secret number.", "Try a number; the reply is higher, lower or correct."]),
        "parameters": {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key]},
    }
    return {"type": "function", "function": spec}


def scene(rng: Random, split: Split, manner: Manner) -> Scene:
    """A whole game, in words or through a tool."""
    secret = draw(rng, split, any_secret)
    machine = guess_tool(rng) if rng.random() < 0.2 else None
    messages = [user(invitation(rng, secret.high) + (" Use the tool." if machine else ""))]
    low, high = 1, secret.high
    while True:
        guess = next_guess(rng, low, high, wide=manner.wide)
        thinking = f"It is between {low} and {high}. I try {guess}." if manner.thinking_on else None
        messages.append(_guess(machine, guess, thinking, rng))
        if guess == secret.number:
            break
        answer = hint(rng, guess, secret.number)
        messages.append(tool(answer) if machine else user(answer))
        low, high = (guess + 1, high) if secret.number > guess else (low, guess - 1)
    won = rng.choice(["correct", "Correct!", "Yes, correct.", "That is it!"])
    closing = rng.choice([f"The number is {guess}.", f"I found it: {guess}."])
    messages += [
        tool(won) if machine else user(won),
        says(closing, f"{guess} is right." if manner.thinking_on else None),
    ]
    return Scene(tuple(messages), (machine,) if machine else ())


def attempt(rng: Random, split: Split, *, thinking_on: bool) -> Attempt:
    """Reward 1 if the number is found with no more guesses than halving needs."""
    secret = draw(rng, split, any_secret)
    heard: tuple[Message, ...] = (user(invitation(rng, secret.high)),)
    for _ in range(secret.fair_guesses):
        reply = yield Dialogue(heard, thinking_on=thinking_on)
        guess = last_integer(reply.content)
        if guess is None or not reply.ended:
            return 0.0
        if guess == secret.number:
            return 1.0
        heard = (*heard, reply.as_message(), user(hint(rng, guess, secret.number)))
    return 0.0


def _guess(machine: Tool | None, guess: int, thinking: str | None, rng: Random) -> Message:
    if machine is None:
        return says(str(guess) if rng.random() < 0.85 else f"My guess is {guess}.", thinking)
    spec = machine["function"]
    key = next(iter(spec["parameters"]["properties"]))
    return calls(Call(spec["name"], {key: guess}), thinking=thinking)
