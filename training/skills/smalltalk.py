"""What is left: greetings, who it is, echoing, and saying no to what it cannot do."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from training.dialogue import Scene, says, user
from training.manner import Manner
from training.split import Split, draw
from training.words import NAMES, NOUNS, VERBS, invented, paragraph, phrase, sentence

CANNOT = "I cannot help with that. I can do short arithmetic, call tools, guess numbers and answer in a given format."

WHO = ["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Who made you?"]
MYSELF = "I am the tiny model that comes with Rolltape. I do short arithmetic, call tools and play guess the number."


@dataclass(frozen=True)
class Talk:
    """One thing said and the reply to it."""

    said: str
    reply: str
    thinking: str

    def key(self) -> tuple[object, ...]:
        return ("talk", self.said)


def any_talk(rng: Random) -> Talk:
    """A greeting, a question about itself, an echo, or something out of reach."""
    kind = rng.randrange(6)
    if kind == 0:
        word = rng.choice(["Hello", "Hi", "Hey", "Good morning", "hello", "hi there"])
        name = rng.choice(NAMES)
        if rng.random() < 0.5:
            return Talk(f"{word}, I am {name}.", f"Hello {name}! What can I do for you?", f"{name} greets me.")
        return Talk(rng.choice([word, f"{word}!", f"{word}."]), "Hello! What can I do for you?", "A greeting.")
    if kind == 1:
        return Talk(rng.choice(WHO), MYSELF, "They ask who I am.")
    if kind == 2:
        words = rng.choice([invented(rng), phrase(rng), sentence(rng), f"{invented(rng)} {invented(rng)}"])
        asked = rng.choice(["Say {}", 'Repeat this: "{}"', "Repeat after me: {}", 'Say exactly "{}"'])
        return Talk(asked.format(words), words, "I repeat it.")
    if kind == 3:
        thanks = rng.choice(["Thanks!", "Thank you.", "Great, thanks.", "Good job!", "ok thanks"])
        return Talk(thanks, "You are welcome.", "They thank me.")
    if kind == 4:
        asked = rng.choice(
            [
                f"Write a {rng.choice(['poem', 'story', 'novel', 'song', 'program'])} about {phrase(rng)}.",
                f"How do I {rng.choice(VERBS)} a {rng.choice(NOUNS)}?",
                f"Why does the {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)}?",
                f"Please {rng.choice(VERBS)} the {rng.choice(NOUNS)} and {rng.choice(VERBS)} {phrase(rng)}.",
                f"What do you think about {phrase(rng)}?",
            ]
        )
        return Talk(asked, CANNOT, "I cannot do this.")
    said = rng.choice([sentence(rng), paragraph(rng, 3), invented(rng), phrase(rng)])
    return Talk(said, CANNOT, "This is not a task that I know.")


def scene(rng: Random, split: Split, manner: Manner) -> Scene:
    """One thing said, one reply."""
    talk = draw(rng, split, any_talk)
    return Scene((user(talk.said), says(talk.reply, talk.thinking if manner.thinking_on else None)))
