"""Choose the renderer for a model folder: the one named, or one whose prompts equal the folder's template."""

from typing import Any

import msgspec

from rolltape.errors import CheckpointError, PromptError
from rolltape.gateway.prompts.families import DEFAULT, Renderer, guessable, make, thinking_option
from rolltape.gateway.prompts.probes import agreement, agrees_on_question
from rolltape.gateway.prompts.tokenizer import FolderTokenizer

_HERMES = '{"name": <function-name>, "arguments": <args-json-object>}'


class Choice(msgspec.Struct, frozen=True):
    """A family and why it was taken."""

    name: str
    why: str
    thinking_option: str | None  # the template option that turns thinking on and off; None: there is none
    options: dict[str, Any] = {}  # with which its renderers are made
    warning: str | None = None


def choose(tokenizer: FolderTokenizer, named: str | None) -> Choice:
    """The family for a folder, with a warning where its prompts will not be the template's, or will not bridge."""
    if named is not None and named != DEFAULT:
        return _as_named(tokenizer, named)
    if tokenizer.template is None:
        raise CheckpointError(f"{tokenizer.name_or_path}: no chat template to tell the renderer by; name one")
    fitting = [] if named else _fitting(tokenizer)
    for name, renderer in fitting:
        if agreed := agreement(renderer, tokenizer):
            return Choice(name, f"renders as the folder's template on {agreed} probes", _switch(name, tokenizer))
    why = "named" if named else "no renderer gives what the folder's template gives"
    near = [name for name, renderer in fitting if agreement(renderer, tokenizer, with_tools=False)]
    warning = (
        f"{tokenizer.name_or_path}: prompts are rendered whole by its chat template ({why}), so replies are tokenized "
        "anew in every later prompt, and samples end where that changes them"
        + (f"; by name there is {near[0]}, which differs from the template only where tools are used" if near else "")
    )
    return Choice(DEFAULT, why, thinking_option(DEFAULT, tokenizer), _reply_format(tokenizer), warning)


def _as_named(tokenizer: FolderTokenizer, name: str) -> Choice:
    renderer = make(name, tokenizer)
    if tokenizer.template is None:
        return Choice(name, "named; the folder has no template to compare with", thinking_option(name, tokenizer))
    agreed = agreement(renderer, tokenizer)
    if agreed is not None:
        return Choice(name, f"named; renders as the folder's template on {agreed} probes", _switch(name, tokenizer))
    warning = (
        f"{tokenizer.name_or_path}: renderer {name} was named, but the folder's chat template renders otherwise; "
        "leave the name away unless the model was trained with that renderer"
    )
    why = "named; the folder's template renders otherwise"
    return Choice(name, why, thinking_option(name, tokenizer), warning=warning)


def _fitting(tokenizer: FolderTokenizer) -> list[tuple[str, Renderer]]:
    """The families whose tokens the tokenizer has."""
    fitting = []
    for name in guessable():
        try:
            fitting.append((name, make(name, tokenizer)))
        except CheckpointError:
            continue
    return fitting


def _switch(name: str, tokenizer: FolderTokenizer) -> str | None:
    """The family's thinking option, if the folder's template has it too: some checkpoints of a family do not."""
    option = thinking_option(name, tokenizer)
    if option is None:
        return None
    renderers = [make(name, tokenizer, **{option: on}) for on in (True, False)]
    return option if all(agrees_on_question(renderer, tokenizer) for renderer in renderers) else None


def _reply_format(tokenizer: FolderTokenizer) -> dict[str, Any]:
    """How calls are found in a reply: by the form in which the template asks for them."""
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
    try:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tools=[tool])
    except PromptError:
        return {}
    return {"tool_parser": "qwen3"} if _HERMES in tokenizer.decode(ids) else {}
