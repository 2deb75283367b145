"""`rolltape engine`: serve a small model over HTTP, in the form of SGLang."""

from pathlib import Path
from typing import Annotated

import typer

from rolltape.cli.exits import UsageError
from rolltape.records.turn import LogprobKind


def engine(
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="A Qwen3 checkpoint; by default the shipped one.")
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on; not loopback: --api-key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 30000,
    weight_version: Annotated[str, typer.Option("--weight-version", help="What replies call the weights.")] = "default",
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="The name in /v1/models.")
    ] = None,
    context: Annotated[int | None, typer.Option("--context", min=2, help="Limit prompt and reply together.")] = None,
    max_running: Annotated[int, typer.Option("--max-running", min=1, help="Requests that run at once.")] = 64,
    logprobs: Annotated[
        LogprobKind, typer.Option("--logprobs", help="raw, or after_temperature as SGLang gives them.")
    ] = LogprobKind.AFTER_TEMPERATURE,
    incremental: Annotated[
        bool, typer.Option("--incremental-streaming-output", help="Stream what is new, not all that there is.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="ROLLTAPE_ENGINE_KEY", help="Ask for it as a bearer token.")
    ] = None,
) -> int:
    """Serve a small Qwen3 model over HTTP, as SGLang does."""
    from ipaddress import ip_address

    from rolltape.tiny.server.serve import Settings, serve

    try:
        loopback = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not api_key:
        raise UsageError(f"--host {host} is not loopback; give --api-key too, so that not everybody may use it")
    if logprobs is LogprobKind.AFTER_TRUNCATION:
        raise UsageError("--logprobs: raw or after_temperature")
    serve(
        Settings(
            model=model,
            host=host,
            port=port,
            weight_version=weight_version,
            served_model_name=served_model_name,
            context=context,
            max_running=max_running,
            logprobs=logprobs,
            incremental=incremental,
            api_key=api_key,
        )
    )
    return 0
