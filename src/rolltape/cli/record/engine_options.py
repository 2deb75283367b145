"""Options about engines and sampling, shared by the commands that run a gateway."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_args

from rolltape.cli.parameters import option
from rolltape.errors import UsageError
from rolltape.records.turn import LogprobKind

if TYPE_CHECKING:
    from rolltape.gateway.exchange import SamplingParams
    from rolltape.gateway.prompts.chat import Retention

engine_option = partial(option, section="Engine")
sampling_option = partial(option, section="Sampling")


@dataclass(frozen=True)
class EngineOptions:
    """Which engines sample, and how prompts are rendered for them."""

    engine: Annotated[
        list[str] | None,
        engine_option(
            "--engine ENGINE",
            "sglang:URL, vllm:URL, llamacpp:URL, openai:URL, embedded[:FOLDER], or "
            "replay:RUN#ROLLOUT; repeatable (default: embedded).",
        ),
    ] = None
    engine_key: Annotated[
        str | None, engine_option("--engine-key KEY", "API key of the engines.", envvar="ROLLTAPE_ENGINE_KEY")
    ] = None
    served_model_name: Annotated[
        str | None,
        engine_option("--served-model-name NAME", "Model name for agents and in records (default: the engine's)."),
    ] = None
    logprobs: Annotated[
        LogprobKind | None,
        engine_option(
            "--logprobs KIND",
            "raw, after_temperature, or after_truncation, for engines that do not say which they return.",
        ),
    ] = None
    routed_experts: Annotated[
        bool, engine_option("--routed-experts", "Record routed experts (SGLang engines that return them).")
    ] = False
    renderer: Annotated[
        str | None, engine_option("--renderer NAME", "Chat renderer, such as qwen3 (default: by the model).")
    ] = None
    thinking_retention: Annotated[
        str | None,
        sampling_option(
            "--thinking-retention HOW",
            "Earlier thinking kept in prompts: template, tool_cycle, or all (every prompt extends the last).",
        ),
    ] = None
    force: Annotated[
        list[str] | None,
        sampling_option(
            "--force NAME=VALUE", "Force a sampling parameter, such as min_p=0.1 (overrides the agent); repeatable."
        ),
    ] = None

    @property
    def engines(self) -> list[str]:
        return self.engine or ["embedded"]

    def retention(self) -> "Retention | None":
        """What --thinking-retention names; None if it is not given."""
        from rolltape.gateway.prompts.chat import Retention

        known: dict[str | None, Retention | None] = {None: None, **{name: name for name in get_args(Retention)}}
        if self.thinking_retention not in known:
            names = ", ".join(get_args(Retention))
            raise UsageError(f"--thinking-retention {self.thinking_retention}: unknown; use one of {names}")
        return known[self.thinking_retention]

    def forced_sampling(self, **named: Any) -> "SamplingParams":
        """What --force sets, and the parameters with flags of their own that are not None."""
        import msgspec

        from rolltape.gateway.exchange import SamplingParams

        given = self.force or []
        values: dict[str, object] = {name: value for name, value in named.items() if value is not None}
        for one in given:
            name, equals, value = one.partition("=")
            if not equals or name not in SamplingParams.__struct_fields__:
                known = ", ".join(SamplingParams.__struct_fields__)
                raise UsageError(f"--force {one}: give NAME=VALUE; names are {known}")
            values[name] = [value] if name == "stop" else value
        try:
            return msgspec.convert(values, SamplingParams, strict=False)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            name = where.rstrip("`").partition("[")[0]
            flag = "--max-reply-tokens" if name == "max_tokens" else f"--{name.replace('_', '-')}"
            where = f"{flag} {named[name]}" if name in named else f"--force {' '.join(given)}"
            raise UsageError(f"{where}: {what}") from None
