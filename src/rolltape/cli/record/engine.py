"""`rolltape engine`: serve a small model over HTTP with SGLang's API."""

from pathlib import Path
from typing import Annotated

from rolltape.cli.options import HostOption, PortOption, require_key
from rolltape.cli.parameters import option
from rolltape.errors import UsageError
from rolltape.records.turn import LogprobKind


def engine(
    *,
    model: Annotated[Path | None, option("--model FOLDER", "Qwen3 checkpoint (default: the shipped model).")] = None,
    served_model_name: Annotated[str | None, option("--served-model-name NAME", "Model name in /v1/models.")] = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 30000,
    api_key: Annotated[
        str | None, option("--api-key KEY", "Require this bearer token.", envvar="ROLLTAPE_ENGINE_KEY")
    ] = None,
    weight_version: Annotated[str, option("--weight-version NAME", "Weight version to report in replies.")] = "default",
    context: Annotated[int | None, option("--context N", "Maximum tokens of prompt and reply together.", min=2)] = None,
    max_running: Annotated[int, option("--max-running N", "Maximum requests at a time.", min=1)] = 64,
    logprobs: Annotated[
        LogprobKind, option("--logprobs KIND", "Logprobs to return: raw, or after_temperature as SGLang does.")
    ] = LogprobKind.AFTER_TEMPERATURE,
    incremental: Annotated[
        bool, option("--incremental-streaming-output", "Stream only the new text in each chunk, not all text so far.")
    ] = False,
) -> int:
    """Serve a small Qwen3 model over HTTP with SGLang's API."""
    from rolltape.tiny.server.serve import serve_engine

    require_key(host, api_key, "--api-key")
    if logprobs is LogprobKind.AFTER_TRUNCATION:
        raise UsageError("--logprobs after_truncation: this engine returns raw or after_temperature")
    serve_engine(
        model,
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
    return 0
