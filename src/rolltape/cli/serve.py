"""`rolltape serve`: the gateway between agents and an engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolltape.cli.exits import UsageError
from rolltape.cli.options import chosen_retention
from rolltape.records.turn import LogprobKind

if TYPE_CHECKING:
    from rolltape.capture.exchange import SamplingParams


def serve(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run to record on; it is made if there is none.")],
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            help="sglang:URL, vllm:URL, llamacpp:URL, openai:URL, embedded[:FOLDER], replay:RUN#ROLLOUT; several too.",
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="With the tokenizer of what the engine serves.")
    ] = None,
    engine_key: Annotated[
        str | None, typer.Option("--engine-key", envvar="ROLLTAPE_ENGINE_KEY", help="The engines' own API key.")
    ] = None,
    logprobs: Annotated[
        LogprobKind | None, typer.Option("--logprobs", help="Their kind, where the engine does not say.")
    ] = None,
    routed_experts: Annotated[
        bool, typer.Option("--routed-experts", help="Record them too; of sglang engines that return them.")
    ] = False,
    host: Annotated[str, typer.Option("--host", help="Not loopback: --admin-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8400,
    public_url: Annotated[
        str | None, typer.Option("--public-url", help="By which agents elsewhere reach the gateway.")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option("--admin-key", envvar="ROLLTAPE_ADMIN_KEY", help="Asked of whoever opens sessions.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Requests without a session get one, a key each.")] = False,
    renderer: Annotated[
        str | None, typer.Option("--renderer", help="By name (qwen3, glm-5, …); else resolved from the model.")
    ] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="Where the agent does not say.")
    ] = None,
    thinking_retention: Annotated[
        str | None,
        typer.Option("--thinking-retention", help="template, tool_cycle, or all: prompts then always extend."),
    ] = None,
    special_text: Annotated[
        str, typer.Option("--special-text", help="Special tokens spelled out in text: pass, or plain text.")
    ] = "pass",
    force: Annotated[
        list[str] | None,
        typer.Option("--force", metavar="NAME=VALUE", help="A sampling parameter whatever agents say: temperature=1."),
    ] = None,
    model_name: Annotated[str | None, typer.Option("--served-model-name", help="The name in /v1/models.")] = None,
    max_reply_tokens: Annotated[
        int, typer.Option("--max-reply-tokens", min=1, help="Where the agent says nothing.")
    ] = 32_768,
    drain_s: Annotated[float, typer.Option("--drain", help="Seconds for turns in flight at the end.")] = 30.0,
) -> int:
    """Serve agents through an engine, and record every turn."""
    from rolltape.capture.engines.opening import open_engine
    from rolltape.capture.serve import serve_gateway
    from rolltape.capture.server.guard import is_loopback
    from rolltape.capture.settings import GatewaySettings

    if not is_loopback(host) and not admin_key:
        raise UsageError(f"--host {host} is not loopback; give --admin-key too, so that not everybody may use it")
    engines = engine or ["embedded"]
    if special_text not in ("pass", "plain"):
        raise UsageError(f"--special-text {special_text}: pass or plain")
    settings = GatewaySettings(
        host=host,
        port=port,
        public_url=public_url,
        admin_key=admin_key,
        open=open_,
        model_name=model_name,
        renderer=renderer,
        thinking=thinking,
        thinking_retention=chosen_retention(thinking_retention),
        special_text=special_text,
        forced=_forced(force or []),
        max_reply_tokens=max_reply_tokens,
        drain_s=drain_s,
    )
    opened = [
        open_engine(
            one,
            api_key=engine_key if "://" in one else None,
            logprob_kind=logprobs,
            routed_experts=routed_experts or None,
        )
        for one in engines
    ]
    serve_gateway(opened, run, model or _embedded_folder(engines), settings)
    return 0


def _embedded_folder(engines: list[str]) -> Path | None:
    """The folder of the first embedded engine, whose tokenizer is the model's; None: there is none."""
    from rolltape.capture.engines.embedded.shipped import shipped_model

    places = [place for kind, _, place in (one.partition(":") for one in engines) if kind == "embedded"]
    return (Path(places[0]) if places[0] else shipped_model()) if places else None


def _forced(given: list[str]) -> "SamplingParams":
    import msgspec

    from rolltape.capture.exchange import SamplingParams

    values: dict[str, object] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or name not in SamplingParams.__struct_fields__:
            known = ", ".join(SamplingParams.__struct_fields__)
            raise UsageError(f"--force {one}: give NAME=VALUE, with a name of {known}")
        values[name] = [value] if name == "stop" else value
    try:
        return msgspec.convert(values, SamplingParams, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"--force {' '.join(given)}: {error}") from None
