"""`rolltape engine`: serve a small model over HTTP with SGLang's API."""

from pathlib import Path
from typing import Annotated

import typer

from rolltape.cli.options import HostOption, PortOption, require_key
from rolltape.errors import UsageError
from rolltape.records.turn import LogprobKind


def engine(
    *,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="Qwen3 checkpoint (default: the shipped model).")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", metavar="NAME", help="Model name in /v1/models.")
    ] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 30000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", envvar="ROLLTAPE_ENGINE_KEY", help="Require this bearer token."),
    ] = None,
    weight_version: Annotated[
        str, typer.Option("--weight-version", metavar="NAME", help="Weight version to report in replies.")
    ] = "default",
    context: Annotated[
        int | None, typer.Option("--context", metavar="N", min=2, help="Maximum tokens of prompt and reply together.")
    ] = None,
    max_running: Annotated[
        int, typer.Option("--max-running", metavar="N", min=1, help="Maximum requests at a time.")
    ] = 64,
    logprobs: Annotated[
        LogprobKind,
        typer.Option(
            "--logprobs", metavar="KIND", help="Logprobs to return: raw, or after_temperature as SGLang does."
        ),
    ] = LogprobKind.AFTER_TEMPERATURE,
    incremental: Annotated[
        bool,
        typer.Option("--incremental-streaming-output", help="Stream only new text in each chunk, not all so far."),
    ] = False,
) -> int:
    """Serve a small Qwen3 model over HTTP with SGLang's API."""
    from rolltape.tiny.server.serve import Settings, serve

    require_key(host, api_key, "--api-key")
    if logprobs is LogprobKind.AFTER_TRUNCATION:
        raise UsageError("--logprobs after_truncation: this engine returns raw or after_temperature")
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
