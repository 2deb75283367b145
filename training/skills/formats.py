"""Answering in a demanded format: the question is easy, the form is what counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from training.dialogue import Dialogue, Scene, says, user
from training.manner import Manner
from training.reply import Attempt
from training.split import Split, draw
from training.words import ADJECTIVES, ANIMALS, CITIES, COLORS, NAMES, NOUNS, THINGS, invented, sentence

COMPLAINTS = ("That is not the format I asked for.", "Wrong format. Again, please.")


@dataclass(frozen=True)
class Question:
    """A question that its own text answers."""

    text: str
    answer: str
    thinking: str


@dataclass(frozen=True)
class Form:
    """A demanded form: how it is asked for, and what the answer looks like in it."""

    demand: str
    written: str
    name: str


@dataclass(frozen=True)
class Demand:
    """A question together with the form that its answer must have."""

    question: Question
    form: Form
    form_first: bool

    def key(self) -> tuple[object, ...]:
        return ("format", self.question.text, self.form.written)

    @property
    def text(self) -> str:
        parts = [self.form.demand, self.question.text] if self.form_first else [self.question.text, self.form.demand]
        return " ".join(parts)


def any_question(rng: Random) -> Question:
    """Facts stated and asked back, little words to pick, tiny counts."""
    kind = rng.randrange(7)
    who, other = rng.sample(NAMES, 2)
    thing, second = rng.sample(THINGS, 2)
    if kind == 0:
        color = rng.choice(COLORS)
        text = f"The {thing} of {who} is {color}. What color is the {thing}?"
        return Question(text, color, f"The {thing} is {color}.")
    if kind == 1:
        city = rng.choice(CITIES)
        return Question(f"{who} lives in {city}. Where does {who} live?", city, f"{who} lives in {city}.")
    if kind == 2:
        animal = rng.choice(ANIMALS)
        text = f"{who} has a {animal} and {other} has a {thing}. Which animal is it?"
        return Question(text, animal, f"{who} has a {animal}.")
    if kind == 3:
        listed = rng.sample(THINGS, rng.randint(3, 4))
        which, place = rng.choice([("first", 0), ("last", -1), ("second", 1)])
        text = f"What is the {which} word of this list: {', '.join(listed)}?"
        return Question(text, listed[place], f"The {which} is {listed[place]}.")
    if kind == 4:
        listed = rng.sample(ANIMALS + THINGS, rng.randint(2, 5))
        text = f"How many words are in this list: {', '.join(listed)}?"
        return Question(text, str(len(listed)), f"There are {len(listed)}.")
    if kind == 5:
        word = rng.choice([rng.choice(ADJECTIVES), rng.choice(NOUNS), invented(rng)])
        text = f"The password is {word}. {sentence(rng)} What is the password?"
        return Question(text, word, f"The password is {word}.")
    more, less = (thing, second) if rng.random() < 0.5 else (second, thing)
    text = f"The {more} is bigger than the {less}. Which of {thing} and {second} is bigger?"
    return Question(text, more, f"The {more} is bigger.")


def any_form(rng: Random, answer: str) -> Form:
    """One of fourteen forms, with keys and tags that vary."""
    return rng.choice(FORMS)(rng, answer)


def any_demand(rng: Random) -> Demand:
    """A question and a form for it."""
    question = any_question(rng)
    return Demand(question, any_form(rng, question.answer), rng.random() < 0.3)


def scene(rng: Random, split: Split, manner: Manner) -> Scene:
    """The demanded form; one reply in six slips and is put right after a complaint."""
    demand = draw(rng, split, any_demand)
    right = says(demand.form.written, demand.question.thinking if manner.thinking_on else None)
    if rng.random() > 0.16:
        return Scene((user(demand.text), right))
    slip = says(slipped(rng, demand), demand.question.thinking if manner.thinking_on else None)
    complaint = rng.choice([*COMPLAINTS, f"No. {demand.form.demand}", "Follow the format."])
    return Scene((user(demand.text), slip, user(complaint), right))


def slipped(rng: Random, demand: Demand) -> str:
    """The right answer in the wrong form."""
    answer = demand.question.answer
    wordy = f"{demand.form.written}\n\nThat is the answer."
    slips = [f"The answer is {answer}.", answer, demand.question.thinking, wordy]
    return rng.choice([slip for slip in slips if slip != demand.form.written])


def attempt(rng: Random, split: Split, *, thinking_on: bool) -> Attempt:
    """Reward 1 for the right answer in exactly the demanded form."""
    demand = draw(rng, split, any_demand)
    reply = yield Dialogue((user(demand.text),), thinking_on=thinking_on)
    return float(reply.ended and reply.content == demand.form.written)


def _json(rng: Random, answer: str) -> Form:
    key = rng.choice(["answer", "answer", "result", "value", "reply", "output", rng.choice(NOUNS), invented(rng)])
    demand = rng.choice(
        [
            f'Reply as JSON with the key "{key}".',
            f'Answer with a JSON object that has one key, "{key}".',
            f'Use this format: {{"{key}": "..."}}',
            f"Return JSON with the field {key} and nothing else.",
        ]
    )
    return Form(demand, json.dumps({key: answer}), "json")


def _upper(rng: Random, answer: str) -> Form:
    demand = rng.choice(["Answer in upper case.", "Reply with one word in capital letters.", "Use UPPER CASE only."])
    return Form(demand, answer.upper(), "upper case")


def _lower(rng: Random, answer: str) -> Form:
    demand = rng.choice(["Answer in lower case, one word.", "Reply in lower case letters only."])
    return Form(demand, answer.lower(), "lower case")


def _tags(rng: Random, answer: str) -> Form:
    tag = rng.choice(["answer", "answer", "result", "output", "final", rng.choice(NOUNS), invented(rng)])
    demand = rng.choice(
        [
            f"Put the answer between <{tag}> and </{tag}>.",
            f"Answer inside <{tag}></{tag}> tags.",
            f"Wrap your answer like this: <{tag}>...</{tag}>",
        ]
    )
    return Form(demand, f"<{tag}>{answer}</{tag}>", "tags")


def _prefix(rng: Random, answer: str) -> Form:
    prefix = rng.choice(["Answer", "Result", "Final answer", "ANSWER", rng.choice(NOUNS).capitalize()])
    demand = rng.choice([f'Start your reply with "{prefix}:".', f"Answer in the form {prefix}: ..."])
    return Form(demand, f"{prefix}: {answer}", "prefix")


def _boxed(rng: Random, answer: str) -> Form:
    demand = rng.choice(["Put the answer in \\boxed{}.", "Write the final answer as \\boxed{...}."])
    return Form(demand, f"\\boxed{{{answer}}}", "boxed")


def _quoted(rng: Random, answer: str) -> Form:
    return Form(rng.choice(["Put the answer in double quotes.", "Answer in quotation marks."]), f'"{answer}"', "quotes")


def _brackets(rng: Random, answer: str) -> Form:
    return Form(rng.choice(["Put the answer in square brackets.", "Answer like [this]."]), f"[{answer}]", "brackets")


def _bold(rng: Random, answer: str) -> Form:
    return Form(rng.choice(["Answer in bold (Markdown).", "Make the answer bold with **."]), f"**{answer}**", "bold")


def _fenced(rng: Random, answer: str) -> Form:
    demand = rng.choice(["Put the answer in a code block.", "Answer inside a ``` code block."])
    return Form(demand, f"```\n{answer}\n```", "code block")


def _bullet(rng: Random, answer: str) -> Form:
    return Form(rng.choice(["Answer as a bullet point.", "Reply with one bullet (- ...)."]), f"- {answer}", "bullet")


def _ending(rng: Random, answer: str) -> Form:
    mark = rng.choice(["!", "?", "DONE", "END", "OVER", "###"])
    return Form(f'End your reply with "{mark}".', f"{answer} {mark}", "ending")


def _bare(rng: Random, answer: str) -> Form:
    demand = rng.choice(["Answer with one word.", "One word only.", "No explanation, just the answer."])
    return Form(demand, answer, "one word")


def _twice(rng: Random, answer: str) -> Form:
    return Form(rng.choice(["Say the answer twice.", "Write the answer two times."]), f"{answer} {answer}", "twice")


FORMS: list[Callable[[Random, str], Form]] = [
    _json,
    _json,
    _upper,
    _lower,
    _tags,
    _tags,
    _prefix,
    _boxed,
    _quoted,
    _brackets,
    _bold,
    _fenced,
    _bullet,
    _ending,
    _bare,
    _twice,
]
