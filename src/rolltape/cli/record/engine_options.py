"""The options by which engines and what is asked of them are told, shared by the commands that run a gateway."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rolltape.cli.exits import UsageError
from rolltape.records.turn import LogprobKind

if TYPE_CHECKING:
    from rolltape.gateway.exchange import SamplingParams
    from rolltape.gateway.prompts.chat import Retention

ENGINE, SAMPLING = "Engine", "Sampling"  # as the help groups them

EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        rich_help_panel=ENGINE,
        help="sglang:URL, vllm:URL, llamacpp:URL, openai:URL, embedded[:FOLDER], replay:RUN#ROLLOUT; several too.",
    ),
]
EngineKeyOption = Annotated[
    str | None,
    typer.Option(
        "--engine-key",
        metavar="KEY",
        envvar="ROLLTAPE_ENGINE_KEY",
        rich_help_panel=ENGINE,
        help="The engines' own API key.",
    ),
]
LogprobsOption = Annotated[
    LogprobKind | None,
    typer.Option(
        "--logprobs",
        metavar="KIND",
        rich_help_panel=ENGINE,
        help="raw, after_temperature or after_truncation, where the engine does not say.",
    ),
]
RoutedExpertsOption = Annotated[
    bool,
    typer.Option(
        "--routed-experts", rich_help_panel=ENGINE, help="Record them too; of sglang engines that return them."
    ),
]
RendererOption = Annotated[
    str | None,
    typer.Option(
        "--renderer",
        metavar="NAME",
        rich_help_panel=ENGINE,
        help="By name (qwen3, glm-5, …); else resolved from the model.",
    ),
]
ForceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--force",
        metavar="NAME=VALUE",
        rich_help_panel=SAMPLING,
        help="A sampling parameter whatever agents say: min_p=0.1.",
    ),
]
RetentionOption = Annotated[
    str | None,
    typer.Option(
        "--thinking-retention",
        metavar="HOW",
        rich_help_panel=SAMPLING,
        help="template, tool_cycle, or all: prompts then always extend.",
    ),
]


def chosen_retention(given: str | None) -> "Retention | None":
    """What --thinking-retention names; None: nothing was said."""
    known: dict[str | None, Retention | None] = {
        None: None,
        "template": "template",
        "tool_cycle": "tool_cycle",
        "all": "all",
    }
    if given not in known:
        raise UsageError(f"--thinking-retention {given}: template, tool_cycle or all")
    return known[given]


def forced_sampling(given: list[str], **named: Any) -> "SamplingParams":
    """What --force says, and the parameters that have flags of their own, where those are not None."""
    import msgspec

    from rolltape.gateway.exchange import SamplingParams

    values: dict[str, object] = {name: value for name, value in named.items() if value is not None}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or name not in SamplingParams.__struct_fields__:
            known = ", ".join(SamplingParams.__struct_fields__)
            raise UsageError(f"--force {one}: give NAME=VALUE, with a name of {known}")
        values[name] = [value] if name == "stop" else value
    try:
        return msgspec.convert(values, SamplingParams, strict=False)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`").partition("[")[0]
        flag = f"--{name.replace('_', '-')} {named[name]}" if name in named else f"--force {' '.join(given)}"
        raise UsageError(f"{flag}: {what}") from None
