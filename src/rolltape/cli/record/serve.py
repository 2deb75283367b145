"""`rolltape serve`: run the gateway between agents and an engine."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from rolltape.cli.options import (
    EngineOptions,
    HostOption,
    PortOption,
    engine_option,
    require_key,
    require_url,
    sampling_option,
)
from rolltape.cli.parameters import argument, option, values_for


def serve(
    run: Annotated[Path, argument("RUN", "Run directory to record in; created if missing.")],
    *,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8400,
    public_url: Annotated[str | None, option("--public-url URL", "Address at which agents reach the gateway.")] = None,
    admin_key: Annotated[
        str | None,
        option(
            "--admin-key KEY",
            "Key required to open sessions (default: one that is kept in RUN/admin.header).",
            envvar="ROLLTAPE_ADMIN_KEY",
        ),
    ] = None,
    open_: Annotated[
        bool, option("--open", "Accept requests without a session: by headers, or one per conversation.")
    ] = False,
    open_idle_s: Annotated[
        float, option("--open-idle SECONDS", "With --open: idle time after which a session is finished.", min=1)
    ] = 600.0,
    wait_engine_s: Annotated[
        float,
        option("--wait-engine SECONDS", "Time to wait at the start for an engine to answer.", min=0),
    ] = 0.0,
    workers: Annotated[
        int, option("--workers N", "Processes that serve the port, each with its own journal.", min=1)
    ] = 1,
    drain_s: Annotated[float, option("--drain SECONDS", "Time for turns in flight to finish at shutdown.")] = 30.0,
    engines: EngineOptions,
    model: Annotated[
        Path | None, engine_option("--model FOLDER", "Folder with the tokenizer of the model that is served.")
    ] = None,
    images: Annotated[
        Literal["placeholder", "refuse"],
        option(
            "--images placeholder|refuse",
            "Images and documents for a text-only model: a placeholder, or refuse the request.",
        ),
    ] = "placeholder",
    special_text: Annotated[
        Literal["pass", "plain"],
        engine_option(
            "--special-text HOW",
            "Special tokens spelled out in messages: pass (keep them special) or plain (encode them as text).",
        ),
    ] = "pass",
    thinking: Annotated[
        bool | None, sampling_option("--thinking/--no-thinking", "Thinking on or off (if the agent does not choose).")
    ] = None,
    default_max_reply_tokens: Annotated[
        int,
        sampling_option("--default-max-reply-tokens N", "Maximum tokens per reply (if the agent sets none).", min=1),
    ] = 32_768,
) -> int:
    """Run the gateway: serve agents and record every turn."""
    from rolltape.gateway.engines.opening import open_engines, tiny_folder
    from rolltape.gateway.serve import serve_gateway
    from rolltape.gateway.settings import GatewaySettings, Patience

    require_key(host, admin_key, "--admin-key")
    require_url("--public-url", public_url)
    settings = GatewaySettings(
        host=host,
        port=port,
        public_url=public_url,
        admin_key=admin_key or None,
        keep_admin_key=True,
        open=open_,
        open_idle_s=open_idle_s,
        thinking=thinking,
        images=images,
        special_text=special_text,
        forced=engines.forced_sampling(),
        max_reply_tokens=default_max_reply_tokens,
        patience=Patience(retry_s=engines.engine_retry_s),
        wait_engine_s=wait_engine_s,
        drain_s=drain_s,
        **values_for(GatewaySettings, engines),
    )
    opened = partial(
        open_engines,
        engines.engines,
        api_key=engines.engine_key,
        logprob_kind=engines.logprob_kind,
        routed_experts=engines.routed_experts,
        kept_ids=engines.kept_ids,
    )
    return serve_gateway(opened, run, model or tiny_folder(engines.engines), settings, workers)
