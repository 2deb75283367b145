"""The gateway's settings, read once at its start."""

import warnings

import msgspec

from rolltape.gateway.engines.request_limit import RequestLimit
from rolltape.gateway.prompts.chat import Retention
from rolltape.gateway.request import SamplingParams
from rolltape.gateway.turn.constraints import ConstrainLevel


class Patience(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the gateway waits for engines, and how many errors it accepts."""

    faults: int = 3  # Impossible replies and broken connections in a row before the gateway gives a reply up.
    retry_s: float = 60.0  # How long the gateway asks again while no engine answers, or engines answer 429 or 5xx.
    reply_s: float = 3600.0  # The longest time for one reply.
    look_every_s: float = 10.0  # How often the gateway checks that a generating engine still answers.
    let_go_s: float = 10.0  # How long an engine may take to end what was aborted.
    no_engine_s: float | None = None  # The name of `retry_s` in 0.1. Deprecated.

    def __post_init__(self) -> None:
        if self.no_engine_s is not None:
            warnings.warn("patience: no_engine_s is now retry_s", DeprecationWarning, stacklevel=2)
            msgspec.structs.force_setattr(self, "retry_s", self.no_engine_s)
            msgspec.structs.force_setattr(self, "no_engine_s", None)


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a gateway; engines, model and tape are given separately."""

    host: str = "127.0.0.1"  # The address to listen on. Other than loopback needs `admin_key`.
    port: int = 0  # The port to listen on. 0 takes a free one.
    public_url: str | None = None  # The address that agents get. By default the gateway's own.
    # The key of the admin routes. By default the gateway makes one; off loopback you must give it.
    admin_key: str | None = None
    # Keep a key that was made in the run, where `rolltape status` finds it. By default it stays in memory.
    keep_admin_key: bool = False
    open: bool = False  # Accept requests without a session, and open a session for each conversation.
    open_idle_s: float = 600.0  # An open gateway finishes a session without a reward after this time without a request.
    model_name: str | None = None  # The name in /v1/models. By default the engine's, or that of the folder.
    renderer: str | None = None  # The renderer of prompts. By default it is found from the model's folder.
    thinking: bool | None = None  # Turn thinking on or off, whatever the agent asks.
    # Which earlier thinking prompts keep. By default the model's template decides.
    thinking_retention: Retention | None = None
    # `placeholder` replaces images and documents by a text. `refuse` refuses such requests.
    images: str = "placeholder"
    # `pass` keeps special tokens that are spelled out in text. `plain` encodes them as plain text.
    special_text: str = "pass"
    # `forced`: enforce required calls and schemas. `all`: strict tools too. `none`: nothing.
    constrain: ConstrainLevel = "forced"
    sampling: SamplingParams = SamplingParams()  # Sampling parameters where agent and session give none.
    forced: SamplingParams = SamplingParams()  # Sampling parameters that override agent and session.
    max_reply_tokens: int = 32_768  # The longest reply where the agent sets no limit and the context leaves room.
    patience: Patience = Patience()  # How long the gateway waits for engines.
    engine_limit: RequestLimit = RequestLimit()  # The most requests to each engine, by this process.
    keepalive_s: float = 5.0  # How often a stream sends a sign of life while nothing is sampled.
    max_body_mib: int = 32  # The largest body, also after decompression.
    max_messages: int = 10_000  # The most messages in one request.
    body_s: float = 60.0  # The longest time for a body to arrive.
    idle_s: float = 75.0  # The longest time that a connection may stay without a whole request.
    stall_s: float = 300.0  # The gateway closes a connection whose client reads nothing of a reply for this long.
    # How long the gateway waits at its start for an engine. It listens meanwhile, and is not ready.
    wait_engine_s: float = 0.0
    drain_s: float = 30.0  # How long turns in flight may take when the gateway ends.
    slow_s: float = 120.0  # The gateway logs requests that take longer.
