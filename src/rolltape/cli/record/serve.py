"""`rolltape serve`: the gateway between agents and an engine."""

from pathlib import Path
from typing import Annotated

import typer

from rolltape.cli.exits import UsageError
from rolltape.cli.record.engine_options import (
    ENGINE,
    SAMPLING,
    EngineKeyOption,
    EngineOption,
    ForceOption,
    LogprobsOption,
    RendererOption,
    RetentionOption,
    RoutedExpertsOption,
    chosen_retention,
    forced_sampling,
)


def serve(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run to record on; it is made if there is none.")],
    engine: EngineOption = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="FOLDER", rich_help_panel=ENGINE, help="With the tokenizer of what is served."),
    ] = None,
    engine_key: EngineKeyOption = None,
    logprobs: LogprobsOption = None,
    routed_experts: RoutedExpertsOption = False,
    host: Annotated[str, typer.Option("--host", help="Not loopback: --admin-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8400,
    public_url: Annotated[
        str | None, typer.Option("--public-url", help="By which agents elsewhere reach the gateway.")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option("--admin-key", envvar="ROLLTAPE_ADMIN_KEY", help="Asked of whoever opens sessions.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Requests without a session get one, a key each.")] = False,
    renderer: RendererOption = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", rich_help_panel=SAMPLING, help="Where the agent does not say."),
    ] = None,
    thinking_retention: RetentionOption = None,
    special_text: Annotated[
        str,
        typer.Option("--special-text", rich_help_panel=ENGINE, help="Special tokens spelled out: pass, or plain text."),
    ] = "pass",
    force: ForceOption = None,
    model_name: Annotated[str | None, typer.Option("--served-model-name", help="The name in /v1/models.")] = None,
    max_reply_tokens: Annotated[
        int, typer.Option("--max-reply-tokens", min=1, rich_help_panel=SAMPLING, help="Where the agent says nothing.")
    ] = 32_768,
    drain_s: Annotated[float, typer.Option("--drain", help="Seconds for turns in flight at the end.")] = 30.0,
) -> int:
    """Serve agents through an engine, and record every turn."""
    from rolltape.gateway.engines.opening import embedded_folder, open_engines
    from rolltape.gateway.serve import serve_gateway
    from rolltape.gateway.server.guard import is_loopback
    from rolltape.gateway.settings import GatewaySettings

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
        forced=forced_sampling(force or []),
        max_reply_tokens=max_reply_tokens,
        drain_s=drain_s,
    )
    opened = open_engines(engines, api_key=engine_key, logprob_kind=logprobs, routed_experts=routed_experts)
    serve_gateway(opened, run, model or embedded_folder(engines), settings)
    return 0
