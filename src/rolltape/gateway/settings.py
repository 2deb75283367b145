"""The gateway's settings, read once at its start."""

import warnings

import msgspec

from rolltape.gateway.engines.request_limit import RequestLimit
from rolltape.gateway.prompts.chat import Retention
from rolltape.gateway.request import SamplingParams
from rolltape.gateway.turn.constraints import ConstrainLevel


class Patience(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the gateway waits for engines, and how many errors it accepts."""

    faults: int = 3  # impossible replies and broken connections in a row until the reply is given up
    retry_s: float = 60.0  # that no engine takes it: none answers, or they answer 429 or 5xx, or abort it at once
    reply_s: float = 3600.0  # that one reply takes
    look_every_s: float = 10.0  # whether an engine that is generating still answers
    let_go_s: float = 10.0  # that an engine may take to end what was aborted
    no_engine_s: float | None = None  # the name of `retry_s` in 0.1

    def __post_init__(self) -> None:
        if self.no_engine_s is not None:
            warnings.warn("patience: no_engine_s is now retry_s", DeprecationWarning, stacklevel=2)
            msgspec.structs.force_setattr(self, "retry_s", self.no_engine_s)
            msgspec.structs.force_setattr(self, "no_engine_s", None)


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a gateway; engines, model and tape are given separately."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    public_url: str | None = None  # by which agents reach it; None: its own address
    admin_key: str | None = None  # None: one is made; off loopback it must be given
    keep_admin_key: bool = False  # one that is made: in the run, where `rolltape status` finds it; else in memory
    open: bool = False  # requests without a session get one, by what they say and by the conversation they go on with
    open_idle_s: float = 600.0  # after which a session that a request opened is finished, without a reward
    model_name: str | None = None  # in /v1/models; None: the engine's, or the folder's
    renderer: str | None = None  # None: resolved from the model's folder
    thinking: bool | None = None  # None: as the agent asks, else as the model's template has it
    thinking_retention: Retention | None = None  # None: as the model's template has it
    images: str = "placeholder"  # for images and documents, which the model cannot see; or "refuse" such requests
    special_text: str = "pass"  # special tokens spelled out in text: "pass", or "plain" text
    constrain: ConstrainLevel = "forced"  # "forced" calls and schemas, "all": strict tools too, "none": nothing
    sampling: SamplingParams = SamplingParams()  # defaults for agent and session
    forced: SamplingParams = SamplingParams()  # whatever they say
    max_reply_tokens: int = 32_768  # the default, where the context leaves more room
    patience: Patience = Patience()
    engine_limit: RequestLimit = RequestLimit()  # of requests to each engine, by this process
    keepalive_s: float = 5.0
    max_body_mib: int = 32  # also of what a compressed one expands to
    max_messages: int = 10_000  # of one request
    body_s: float = 60.0  # that a body may take to come
    idle_s: float = 75.0  # that a connection may be without a whole request; proxies keep theirs for a minute
    stall_s: float = 300.0  # that a client may take nothing of a reply that is written; then its connection is closed
    wait_engine_s: float = 0.0  # at the start, for an engine to answer; it listens meanwhile, and is not ready
    drain_s: float = 30.0  # that turns in flight may take when the gateway ends
    slow_s: float = 120.0  # requests that take longer are logged
