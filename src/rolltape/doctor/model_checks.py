"""Checks of a model folder: its template against the renderer, its special tokens, and which prompts will bridge."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rolltape.doctor.agent.scripted_replies import Message, write_reply
from rolltape.doctor.results import CheckResult, fault, named, note, ok, warning, words
from rolltape.errors import PromptError
from rolltape.gateway.prompts import ChatPrompts, PromptIds
from rolltape.gateway.prompts.choosing import TemplateMatch
from rolltape.gateway.prompts.tokenizer import FolderTokenizer, read_json
from rolltape.records.turn import Ids, TokenChain, common_length

_MARK = re.compile(r"<[|｜][^<>\s]{1,40}[|｜]>")
_SHOWN = 12  # ids on each side of a difference
_PARAMETERS = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}
_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "description": "Look at a place.", "parameters": _PARAMETERS}}
]
_CALL = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": {"where": "here"}}}
_ASKED: Message = {"role": "user", "content": "What is there?"}
_CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_TOLD: Message = {"role": "assistant", "content": "Two things."}
_HEARD: Message = {"role": "tool", "content": "a and b", "tool_call_id": "call_0", "name": "look"}
_THOUGHT = {"reasoning_content": "I must look."}

# Examples of what follows a reply: the reply, the messages after it, and whether thinking is on.
_FOLLOWING: dict[str, tuple[Message, list[Message], bool | None]] = {
    "tool result": (_CALLED, [_HEARD], False),
    "tool result after thinking": (_CALLED | _THOUGHT, [_HEARD], None),
    "user message": (_TOLD, [_ASKED], False),
    "user message after thinking": (_TOLD | _THOUGHT, [_ASKED], None),
}


class ModelProbe(msgspec.Struct, frozen=True):
    """A model folder with its prompts as in the gateway."""

    folder: Path
    prompts: ChatPrompts
    tokenizer: FolderTokenizer


ModelCheck = Callable[[ModelProbe], CheckResult | None]


def check_model(probe: ModelProbe) -> Iterator[CheckResult]:
    """Run the checks of a model folder one by one."""
    for name, check in MODEL_CHECKS.items():
        result = check(probe)
        if result is not None:
            yield named(name, result)


def _template(probe: ModelProbe) -> CheckResult:
    match = probe.prompts.compare_with_template()
    renderer = probe.prompts.renderer.partition(" ")[0]
    if probe.tokenizer.template is None:
        return note(f"the folder has none; {renderer} was named", "add the model's chat template to compare")
    if match is None:
        return warning(
            "no renderer gives the ids of the folder's template, so the template itself renders every prompt whole",
            "see that the template is the model's own; otherwise samples end where a reply is tokenized differently",
        )
    if match.chat is not None:
        return fault(
            f"renderer {renderer} and the folder's template give different ids {_first_difference(probe, match)}",
            "leave out --renderer, or give the folder of the model that is served",
        )
    return ok(f"renderer {renderer} gives the ids of the folder's template on {match.agreed} conversations")


def _first_difference(probe: ModelProbe, match: TemplateMatch) -> str:
    if match.rendered is None or match.expected is None:
        return "(the renderer refuses a conversation)"
    at = common_length(match.rendered, match.expected)
    start = max(at - 2, 0)
    ours, theirs = (probe.tokenizer.decode(ids[start : at + _SHOWN]) for ids in (match.rendered, match.expected))
    return f"from id {at} on: {ours!r}, and {theirs!r} by the template"


def _special_tokens(probe: ModelProbe) -> CheckResult | None:
    """Whether the marks in the template's output are tokens of this tokenizer."""
    tokenizer = probe.tokenizer
    if tokenizer.template is None:
        return None
    marks: set[str] = set()
    for chat, tools in (([_ASKED, _TOLD, _ASKED], None), ([_ASKED, _CALLED, _HEARD], _TOOLS)):
        try:
            marks |= set(_MARK.findall(tokenizer.template.render(chat, tools=tools, add_generation_prompt=True)))
        except PromptError:
            continue
    unknown = sorted(mark for mark in marks if tokenizer.convert_tokens_to_ids(mark) is None)
    if unknown:
        return fault(
            f"the template writes {', '.join(unknown[:3])}, which the tokenizer splits into letters",
            "the template is another model's; take the chat template and the tokenizer from one folder",
        )
    return ok(f"all {len(marks)} marks of the template are tokens" if marks else "the template has no marks")


def _stop_ids(probe: ModelProbe) -> CheckResult:
    """Whether the gateway's stop ids are those of the model."""
    stops = set(probe.prompts.stop_ids)
    spelled = ", ".join(probe.tokenizer.decode([one]) for one in sorted(stops))
    configured = read_json(probe.folder / "generation_config.json").get("eos_token_id")
    own = set(configured if isinstance(configured, list) else [] if configured is None else [configured])
    if not own:
        return ok(f"{spelled}; the folder has no generation_config.json to compare")
    if not own & stops:
        names = ", ".join(probe.tokenizer.decode([one]) for one in sorted(own))
        return fault(
            f"the renderer ends replies on {spelled}, and generation_config.json on {names}",
            "see that renderer, tokenizer and generation_config.json are of one model",
        )
    return ok(f"{spelled}, as in generation_config.json")


def _vocabulary(probe: ModelProbe) -> CheckResult | None:
    size = read_json(probe.folder / "config.json").get("vocab_size")
    if not isinstance(size, int):
        return None
    if probe.tokenizer.vocabulary > size:
        return fault(
            f"the tokenizer has ids up to {probe.tokenizer.vocabulary - 1:,}, and config.json {size:,} embeddings",
            "the tokenizer is another model's, or tokens were added without embeddings",
        )
    return ok(f"{probe.tokenizer.vocabulary:,} ids in {size:,} embeddings")


def _thinking(probe: ModelProbe) -> CheckResult:
    kept = probe.prompts.thinking_kept
    switch = (
        "requests may turn it on and off" if probe.prompts.switches_thinking else "requests cannot turn it on or off"
    )
    return ok(f"kept in later prompts: {words(kept)}; {switch}", kept=kept)


def _bridging(probe: ModelProbe) -> CheckResult:
    bridged: list[str] = []
    whole: list[str] = []
    for name, (reply, new, thinking) in _FOLLOWING.items():
        sampled = write_reply(probe.prompts, reply, _TOOLS, thinking)
        if sampled is None:
            continue  # for example, a reply without thinking of a model that always thinks
        why = _refusal(probe.prompts, sampled, new, thinking)
        (bridged if why is None else whole).append(name if why is None else f"{name} ({words(why)})")
    figures = {"bridged": bridged, "rendered": whole}
    if not whole:
        return ok(f"prompts extend held ids after: {', '.join(bridged)}", **figures)
    measured = f"rendered whole after: {', '.join(whole)}"
    if bridged:
        measured = f"prompts extend held ids after: {', '.join(bridged)}; {measured}"
        return note(
            measured, "--thinking-retention all keeps thinking, so that every prompt extends the last", **figures
        )
    return warning(measured, "replies are tokenized again in every prompt; name a renderer with --renderer", **figures)


def _refusal(prompts: ChatPrompts, sampled: Ids, new: list[Message], thinking: bool | None) -> str | None:
    """Why a prompt cannot be extended by the messages after a reply, or None."""
    held = prompts.render([_ASKED], _TOOLS, thinking).ids
    nothing_to_drop = not prompts.has_thinking(sampled)
    given = prompts.bridge(TokenChain(held), sampled, new, _TOOLS, thinking, nothing_to_drop=nothing_to_drop)
    return None if isinstance(given, PromptIds) else str(given)


MODEL_CHECKS: dict[str, ModelCheck] = {
    "template": _template,
    "special tokens": _special_tokens,
    "stop ids": _stop_ids,
    "vocabulary": _vocabulary,
    "thinking": _thinking,
    "bridging": _bridging,
}
