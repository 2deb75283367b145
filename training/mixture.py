"""The training mixture: which skills meet in a dialogue, under which system prompt, among which other tools."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from training.dialogue import Dialogue, Message, Scene, Tool
from training.manner import STEADY, Manner
from training.skills import arithmetic, calculator, formats, guessing, smalltalk, toolcalls
from training.split import Split
from training.toolbox import any_kit
from training.words import NAMES, handbook, paragraph, sentence

_MakeScene = Callable[[Random, Split, Manner], Scene]

# Arithmetic without a tool takes the most examples to learn; it has the drills besides.
SKILLS: list[tuple[float, _MakeScene]] = [
    (0.20, arithmetic.scene),
    (0.16, calculator.scene),
    (0.15, guessing.scene),
    (0.16, formats.scene),
    (0.25, toolcalls.scene),
    (0.03, toolcalls.double_scene),
    (0.05, smalltalk.scene),
]


def any_dialogue(rng: Random, manner: Manner = STEADY) -> Dialogue:
    """One training dialogue: a drill, or up to a dozen scenes; tools shuffled, thinking on in four of ten."""
    manner = manner.thinking(rng.random() < 0.4)
    if rng.random() < 0.25:
        return _drill(rng, manner)
    scenes = _scenes(rng, manner)
    tools = _tools(rng, scenes)
    spoken = [message for scene in scenes for message in scene.messages]
    system = any_system(rng)
    opening = [Message("system", system)] if system is not None else []
    return Dialogue(tuple(opening + spoken), tools, manner.thinking_on, keep_thinking=rng.random() < 0.5)


def any_system(rng: Random) -> str | None:
    """No system prompt, a short one, or a long handbook."""
    kind = rng.random()
    if kind < 0.35:
        return None
    if kind < 0.75:
        return rng.choice(
            [
                "You are a helpful assistant.",
                "You are a helpful assistant.",
                "You are a careful assistant. Use your tools when they help.",
                "Be brief.",
                f"You are {rng.choice(NAMES)}, an assistant. {sentence(rng)}",
                paragraph(rng, rng.randint(1, 4)),
                "Answer the question of the user.",
                "You are an agent. Follow the instructions.",
            ]
        )
    if kind < 0.96:
        return handbook(rng, rng.randint(1, 12))
    return handbook(rng, rng.randint(20, 120) if kind < 0.985 else rng.randint(120, 800))


def _scenes(rng: Random, manner: Manner) -> list[Scene]:
    count = rng.choice([1] * 12 + [2] * 5 + [3] * 3 + [5, 8, 12])
    weights = [weight for weight, _ in SKILLS]
    chosen = [make for _, make in rng.choices(SKILLS, weights, k=count)]
    # Where a calculator is on offer it is used, so a dialogue has sums of one kind only.
    if calculator.scene in chosen:
        chosen = [calculator.scene if make is arithmetic.scene else make for make in chosen]
    made: list[Scene] = []
    for make in chosen:
        scene = make(rng, Split.TRAIN, manner)
        if not _clashes(scene, made):
            made.append(scene)
    return made


def _drill(rng: Random, manner: Manner) -> Dialogue:
    """Many questions that need no tool, one after the other: the most practice per token."""
    makes = rng.choices([arithmetic.scene, formats.scene, smalltalk.scene], [0.85, 0.12, 0.03], k=rng.randint(4, 24))
    spoken = [message for make in makes for message in make(rng, Split.TRAIN, manner).messages]
    return Dialogue(tuple(spoken), (), manner.thinking_on, keep_thinking=True)


def _clashes(scene: Scene, others: list[Scene]) -> bool:
    """Two calculators, or two tools of one name, do not meet in a dialogue."""
    if any(scene.tags & other.tags for other in others):
        return True
    taken = {spec["function"]["name"] for other in others for spec in other.tools}
    return any(spec["function"]["name"] in taken for spec in scene.tools)


def _tools(rng: Random, scenes: list[Scene]) -> tuple[Tool, ...]:
    specs = {spec["function"]["name"]: spec for scene in scenes for spec in scene.tools}
    idle = rng.random() < 0.25
    if idle:
        for _ in range(rng.choice([1, 1, 2, 3, 5, 8, 16])):
            spec = any_kit(rng, Split.TRAIN).spec()
            specs.setdefault(spec["function"]["name"], spec)
    listed = list(specs.values())
    rng.shuffle(listed)
    # Some callers pass the bare function without its envelope.
    bare = rng.random() < 0.25
    return tuple(spec["function"] if bare else spec for spec in listed)
