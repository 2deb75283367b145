"""Tools as agents offer them: made-up ones without end, and a few that resemble those of real agents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from training.dialogue import Tool
from training.split import Split, side_of
from training.words import (
    ADJECTIVES,
    CITIES,
    COLORS,
    COMMANDS,
    NAMES,
    NOUNS,
    THINGS,
    VERBS,
    code,
    invented,
    path,
    phrase,
    sentence,
)


@dataclass(frozen=True)
class Parameter:
    """One parameter: its schema, a way to draw a value, and whether it must be given."""

    key: str
    schema: dict[str, Any]
    value: Callable[[Random], Any]
    required: bool = True


@dataclass(frozen=True)
class Kit:
    """A tool with what is needed to ask for it: what it does in a few words, and its parameters."""

    name: str
    deed: str
    description: str
    parameters: tuple[Parameter, ...]
    decoration: int = 0

    def spec(self) -> Tool:
        """The tool as it stands in the prompt."""
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {p.key: p.schema for p in self.parameters},
            "required": [p.key for p in self.parameters if p.required],
        }
        if self.decoration == 1:
            schema["additionalProperties"] = False
        if self.decoration == 2:
            schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
        function: dict[str, Any] = {"name": self.name, "description": self.description, "parameters": schema}
        if self.decoration == 3:
            function["strict"] = False
        return {"type": "function", "function": function}


def any_kit(rng: Random, split: Split | None, deed: tuple[str, str] | None = None) -> Kit:
    """A made-up tool whose name is on the wanted side; `deed` (verb, noun) makes it resemble another."""
    while True:
        verb, noun = deed or (rng.choice(VERBS), rng.choice(NOUNS))
        if deed is None and rng.random() < 0.2:
            noun = invented(rng)
        elif deed is None and rng.random() < 0.1:
            verb = invented(rng)
        name = _styled(rng, [verb, noun] if rng.random() < 0.85 else [verb, rng.choice(ADJECTIVES), noun])
        if rng.random() < 0.08:
            name = _styled(rng, [invented(rng)])
        if split is None or side_of("tool", name) is split:
            break
    doing = f"{verb} {rng.choice(['the', 'a', 'the', 'one'])} {noun}"
    about = rng.choice(
        [
            f"{doing.capitalize()}.",
            f"{doing.capitalize()}.",
            f"Use this to {doing}.",
            f"{doing.capitalize()} for the user.",
            f"A tool to {doing}. {sentence(rng)}",
            f"{doing.capitalize()}. {sentence(rng)} {sentence(rng)}",
        ]
    )
    count = rng.choice([0, 1, 1, 1, 2, 2, 2, 3, 3, 4])
    made = {p.key: p for p in (any_parameter(rng) for _ in range(count))}
    return Kit(name, f"{verb} the {noun}", about, tuple(made.values()), rng.choice([0, 0, 0, 0, 1, 2, 3]))


def any_parameter(rng: Random) -> Parameter:
    """A parameter of any type; strings are the commonest."""
    required = rng.random() < 0.7
    kind = rng.random()
    if kind < 0.5:
        key, value = rng.choice(_STRINGS)
        if rng.random() < 0.25:
            key, value = rng.choice([rng.choice(NOUNS), invented(rng)]), _word
        schema: dict[str, Any] = {"type": "string"}
    elif kind < 0.75:
        key = rng.choice([*_COUNTS, rng.choice(NOUNS), invented(rng)])
        schema, value = {"type": "integer"}, _integer
    elif kind < 0.82:
        key = rng.choice(["price", "weight", "rate", "distance", "score", "ratio"])
        schema, value = {"type": "number"}, _decimal
    elif kind < 0.89:
        key = rng.choice(["enabled", "force", "public", "urgent", "verbose", "recursive"])
        schema, value = {"type": "boolean"}, _boolean
    else:
        key = rng.choice(["unit", "mode", "priority", "color", "kind", "format", "order"])
        small = ["low", "medium", "high"], ["asc", "desc", "none"]
        options = rng.sample(rng.choice([COLORS, ADJECTIVES, NOUNS, *small]), 3)
        schema, value = {"type": "string", "enum": options}, lambda r: r.choice(options)
    if rng.random() < 0.4:
        of_noun = f"{key.capitalize()} of the {rng.choice(NOUNS)}"
        schema["description"] = rng.choice([f"The {key}", f"The {key} to use", of_noun, sentence(rng)])
    return Parameter(key, schema, value, required)


@dataclass(frozen=True)
class Natural:
    """A tool of a kind that real agents have, with wordings in which `{key}` stands for a value."""

    kit: Kit
    wordings: tuple[str, ...]


def any_natural(rng: Random) -> Natural:
    """One of them, under one of its names."""
    names, description, keys, wordings = rng.choice(_NATURALS)
    parameters = tuple(Parameter(rng.choice(alternatives), {"type": "string"}, value) for alternatives, value in keys)
    kit = Kit(rng.choice(names), "", description, parameters, rng.choice([0, 0, 1, 2]))
    by_place = {f"{{{i}}}": p.key for i, p in enumerate(parameters)}
    worded = []
    for wording in wordings:
        for place, key in by_place.items():
            wording = wording.replace(place, f"{{{key}}}")
        worded.append(wording)
    return Natural(kit, tuple(worded))


def _styled(rng: Random, words: list[str]) -> str:
    style = rng.random()
    if style < 0.6:
        return "_".join(words)
    if style < 0.75:
        return words[0] + "".join(word.capitalize() for word in words[1:])
    if style < 0.85:
        return "".join(word.capitalize() for word in words)
    return "-".join(words) if style < 0.93 else f"{invented(rng)}__{'_'.join(words)}"


def _word(rng: Random) -> str:
    known = [rng.choice(NOUNS), rng.choice(THINGS), rng.choice(NAMES)]
    return rng.choice([*known, invented(rng), code(rng), rng.choice(CITIES)])


def _text(rng: Random) -> str:
    made = rng.choice([phrase, sentence, phrase])(rng)
    return f"{made}\n{phrase(rng)}" if rng.random() < 0.05 else made


def _command(rng: Random) -> str:
    plain, with_path = rng.choice(COMMANDS), f"{rng.choice(COMMANDS)} {path(rng)}"
    return rng.choice([plain, with_path, f"python {path(rng)}", f"rm {path(rng)}"])


def _url(rng: Random) -> str:
    return f"https://{rng.choice(NOUNS)}.{rng.choice(['com', 'org', 'net', 'io'])}/{rng.choice(NOUNS)}"


def _mail(rng: Random) -> str:
    return f"{rng.choice(NAMES).lower()}@{rng.choice(NOUNS)}.{rng.choice(['com', 'org', 'net'])}"


def _date(rng: Random) -> str:
    return f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _integer(rng: Random) -> int:
    return rng.randint(0, 10 ** rng.randint(1, 4))


def _decimal(rng: Random) -> float:
    return rng.randint(1, 999) / 10


def _boolean(rng: Random) -> bool:
    return rng.random() < 0.5


def _person(rng: Random) -> str:
    return rng.choice(NAMES)


def _city(rng: Random) -> str:
    return rng.choice(CITIES)


def _language(rng: Random) -> str:
    return rng.choice(["French", "German", "Spanish", "Italian", "Dutch", "Greek", "Latin", "Polish"])


def _folder(rng: Random) -> str:
    return rng.choice(["src", "docs", "tests", "lib", "."])


_COUNTS = ("count", "limit", "amount", "year", "id", "page", "size", "days", "level")
_STRINGS: list[tuple[str, Callable[[Random], Any]]] = [
    ("name", _person),
    ("city", _city),
    ("location", _city),
    ("title", phrase),
    ("query", _text),
    ("path", path),
    ("file", path),
    ("text", _text),
    ("message", _text),
    ("user", _person),
    ("code", code),
    ("id", code),
    ("date", _date),
    ("email", _mail),
    ("url", _url),
    ("language", _language),
    ("item", _word),
    ("word", _word),
    ("command", _command),
    ("key", _word),
]

_FILE = ("file_path", "path", "file", "filename")
_Keys = tuple[tuple[tuple[str, ...], Callable[[Random], Any]], ...]
_NATURALS: list[tuple[tuple[str, ...], str, _Keys, tuple[str, ...]]] = [
    (
        ("Bash", "bash", "shell", "run_command", "exec_command", "terminal"),
        "Run a shell command and return its output.",
        ((("command", "cmd"), _command),),
        (
            "Run `{0}`.",
            "Run {0}",
            "Execute the command {0}",
            "Please run the command `{0}` for me.",
            "Use the shell to run {0}",
        ),
    ),
    (
        ("Read", "read_file", "open_file", "cat", "view"),
        "Read a file from disk.",
        ((_FILE, path),),
        ("Read {0}", "Read the file {0}.", "Show me what is in {0}.", "What does {0} say?", "Open {0}"),
    ),
    (
        ("Write", "write_file", "create_file", "save_file"),
        "Write text to a file.",
        ((_FILE, path), (("content", "text"), _text)),
        ('Write "{1}" to {0}.', 'Create the file {0} with the content "{1}"', "Save this to {0}: {1}"),
    ),
    (
        ("Grep", "grep", "search_files", "find_in_files"),
        "Search files for a pattern.",
        ((("pattern", "query"), _word), (("path", "directory"), _folder)),
        ("Search for {0} in {1}.", "Find {0} in the folder {1}", 'Look for "{0}" under {1}'),
    ),
    (
        ("get_weather", "weather", "fetch_weather", "getWeather"),
        "Get the current weather for a place.",
        ((("city", "location", "place"), _city),),
        ("What is the weather in {0}?", "How is the weather in {0}?", "Weather for {0}, please.", "Is it cold in {0}?"),
    ),
    (
        ("search_web", "web_search", "search", "WebSearch"),
        "Search the web.",
        ((("query", "q"), phrase),),
        ("Search the web for {0}.", "Look up {0}", "Find pages about {0}.", "Google {0}"),
    ),
    (
        ("send_email", "email", "send_mail"),
        "Send an email.",
        ((("to", "recipient"), _mail), (("body", "message", "text"), _text)),
        ('Send an email to {0} that says "{1}"', 'Email {0}: "{1}"', 'Write to {0} and say "{1}"'),
    ),
    (
        ("translate", "translate_text"),
        "Translate a text into a language.",
        ((("text",), phrase), (("language", "target", "to"), _language)),
        ('Translate "{0}" into {1}.', 'How do you say "{0}" in {1}?', "Translate to {1}: {0}"),
    ),
    (
        ("fetch_url", "WebFetch", "fetch", "open_page"),
        "Fetch a web page.",
        ((("url",), _url),),
        ("Fetch {0}", "Open the page {0}", "What is on {0}?", "Download {0}."),
    ),
    (
        ("remember", "save_note", "add_note", "note"),
        "Store a note for later.",
        ((("text", "note", "content"), _text),),
        ('Remember this: "{0}"', 'Note that "{0}"', 'Save a note: "{0}"'),
    ),
    (
        ("submit", "final_answer", "submit_answer", "answer"),
        "Submit the final answer.",
        ((("answer", "result"), _word),),
        ("Submit {0} as the answer.", "The final answer is {0}, submit it.", "Submit the answer {0}"),
    ),
]
