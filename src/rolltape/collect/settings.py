"""`CollectSettings`: the settings of a collection, and those that must stay the same when it is resumed."""

from collections.abc import Mapping
from typing import Any

import msgspec

from rolltape.collect.environments.judge import Judge
from rolltape.collect.sandboxes.container_settings import ContainerSettings
from rolltape.collect.sandboxes.protocol import SandboxKind, SandboxNetwork
from rolltape.errors import CollectError, GroupsError
from rolltape.gateway.engines.request_limit import RequestLimit
from rolltape.gateway.prompts.chat import Retention
from rolltape.gateway.request import SamplingParams
from rolltape.gateway.turn.constraints import ConstrainLevel
from rolltape.records.turn import LogprobKind
from rolltape.traces import Capture


class CollectSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to collect, by whom, and within which limits. The flags of `rolltape collect` have the same names.

    Example:

        settings = rolltape.CollectSettings(source="tasks.jsonl", group_size=8, step=0, max_turns=4)
    """

    source: str  # A file, a dataset or a function, as `open_source` takes it.
    split: str | None = None  # The split of a dataset.
    source_name: str | None = None  # The name of the source in rollout ids. By default the file's own name.
    limit: int | None = None  # Take this many tasks.
    seed: int | None = None  # Shuffle tasks with this seed. By default tasks keep their order.
    environment: str = "problem"  # The environment of tasks that name none.
    agent: str = "chat"  # The agent of tasks that name none.
    engines: tuple[str, ...] = ("tiny",)  # The engines to sample from.
    model: str | None = None  # A folder with the tokenizer, or a name. By default the tiny engine's own.
    model_name: str | None = None  # The name of the model in records. By default the engine's, or the name in `model`.
    engine_key: str | None = None  # The API key of engines at an address. It is never recorded.
    engine_retry_s: float = 60.0  # How long to ask again when an engine is down, or answers 429 or 5xx.
    engine_limit: RequestLimit = RequestLimit()  # The most requests to each engine.
    logprob_kind: LogprobKind | None = None  # The kind of logprobs. By default as the engine declares it.
    routed_experts: bool = False  # Record routed experts, as a side array.
    kept_ids: bool = False  # Record the ids that top-p, top-k and min-p kept, as the side array `kept_ids`.
    renderer: str | None = None  # The renderer of prompts. By default it is found from the model's own template.
    judge: Judge | None = None  # The judge, for fields that a task's own judge leaves open.
    group_size: int = 8  # Attempts at each task.
    step: int = 0  # The training step that the rollouts are made for.
    max_turns: int = 16  # The most turns of an attempt.
    timeout_s: float = 600.0  # The longest time of an attempt.
    score_timeout_s: float = 300.0  # The longest time of one call of an environment, a checker or a judge.
    sampling: SamplingParams = SamplingParams(temperature=1.0)  # Sampling parameters that override the agent.
    thinking: bool | None = None  # Turn thinking on or off, whatever the agent asks.
    # Which earlier thinking prompts keep. By default the model's template decides.
    thinking_retention: Retention | None = None
    # What constrained decoding enforces: `forced` calls and schemas, `all`, or `none`.
    constrain: ConstrainLevel = "forced"
    context_budget: int | None = None  # The most tokens of prompt and reply together.
    allowed_tools: tuple[str, ...] | None = None  # Offer these tools only.
    denied_tools: tuple[str, ...] = ()  # Do not offer these tools.
    sandbox: SandboxKind = SandboxKind.AUTO  # The sandbox of agents that are programs, and of checks of their work.
    sandbox_network: SandboxNetwork = SandboxNetwork.GATEWAY  # What programs in a sandbox can reach.
    sandbox_read: tuple[str, ...] = ()  # More files and folders that programs in a sandbox can read.
    container: ContainerSettings = ContainerSettings()  # Settings of the sandboxes podman and docker.
    pass_env: tuple[str, ...] = ()  # Environment variables of the collector that programs get.
    host: str = "127.0.0.1"  # The address that the collector's gateway listens on.
    public_url: str | None = None  # The address that agents get. By default the gateway's own.
    admin_key: str | None = None  # The key of that gateway. Off loopback you must give it. It is never recorded.
    capture: Capture = Capture.ALL  # Which rollouts get a trace of their own.
    trace_fraction: float | None = None  # The share of rollouts that are traced, where `capture` is SAMPLED.
    with_records: bool = False  # Results carry the whole record.
    with_fates: bool = False  # Results carry the fates of their sampled tokens.
    max_concurrent: int = 32  # Attempts at the same time.
    grace_s: float = 20.0  # How long running attempts may take when the collection is ended.
    # End after this many failures in a row. 0 never ends. By default four groups, at least 32.
    max_failures: int | None = None
    # Begin no attempt once this many tokens are sampled, earlier processes included.
    max_sampled_tokens: int | None = None
    max_cost: float | None = None  # Begin no attempt once this much is spent, in the currency of the prices.
    max_time_s: float | None = None  # Begin no attempt once this process has collected for so long.
    enough_groups: int | None = None  # Begin no task once the rewards of this many groups differ.
    price_in: float | None = None  # The price of a million prompt tokens. By default as the endpoint reports it.
    price_out: float | None = None  # The price of a million sampled tokens.
    accept_changed_tasks: bool = False  # Resume although tasks have another content under the same id.

    def __post_init__(self) -> None:
        for name, least, needs_more in _LIMITS:
            value = getattr(self, name)
            if value is not None and not (value > least if needs_more else value >= least):
                wanted = f"more than {least}" if needs_more else f"{least} or more"
                raise CollectError(f"{name} is {value}; give {wanted}")
            if isinstance(value, int) and value >= 2**63:
                raise CollectError(f"{name} is {value}; give at most {2**63 - 1}")
        if (self.price_in is None) != (self.price_out is None):
            raise CollectError("price_in and price_out go together; give both")
        if self.max_cost is not None and self.price_in is None and not any(map(_may_report_cost, self.engines)):
            raise CollectError(f"max_cost is {self.max_cost:g}, but nothing has a price; give price_in and price_out")

    @property
    def has_images(self) -> bool:
        """Whether agents that are programs run in containers."""
        return self.sandbox in (SandboxKind.PODMAN, SandboxKind.DOCKER)

    @property
    def failures_to_end(self) -> int:
        """How many attempts in a row may fail before the collection is ended; 0 for any number."""
        return max(_LEAST_FAILURES, 4 * self.group_size) if self.max_failures is None else self.max_failures

    def fixed_by_resume(self, source_name: str) -> dict[str, Any]:
        """The settings that must not differ when a run is resumed, since they determine its rollouts.

        Only the group size may grow.
        The source is compared by its name, which is in the ids. The file may move.
        """
        fixed = {name: getattr(self, name) for name in self.__struct_fields__ if name not in _FREE}
        fixed |= {"source": source_name, "judge": None if self.judge is None else self.judge.model}
        # As read from the tape, which turns tuples into lists.
        decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(fixed))
        return decoded

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in _SECRETS)
        return f"CollectSettings({', '.join(shown)})"


BLOCK_KEYS = ("policy", "run", "to_task")  # of a `rolltape` block in a trainer's config, beside the settings


def settings_in_config(
    block: Mapping[str, Any], defaults: Mapping[str, Any], where: str, *, other_keys: tuple[str, ...] = BLOCK_KEYS
) -> CollectSettings:
    """The settings in a block of a trainer's config, and `defaults` for those that it leaves out.

    Of `sampling`, too, the block replaces only the parameters that it names.
    `other_keys` may be in the block, and are not settings. Any other key, or a wrong value, is a GroupsError.
    """
    given = {name: value for name, value in block.items() if name not in other_keys}
    if unknown := given.keys() - set(CollectSettings.__struct_fields__):
        known = ", ".join((*other_keys, *CollectSettings.__struct_fields__))
        raise GroupsError(f"{where}: {min(unknown)!r} is unknown; known are {known}")
    if isinstance(given.get("sampling"), Mapping):
        given["sampling"] = {**defaults.get("sampling", {}), **given["sampling"]}
    try:
        return msgspec.convert({**defaults, **given}, CollectSettings)
    except (msgspec.ValidationError, CollectError) as error:
        raise GroupsError(f"{where}: {error}") from None


def _may_report_cost(engine: str) -> bool:
    return engine.startswith("openai:")


_SECRETS = ("engine_key", "admin_key")
_LEAST_FAILURES = 32
_LIMITS = (  # name, bound, and whether a value must be above it
    ("limit", 1, False),
    ("group_size", 1, False),
    ("step", 0, False),
    ("max_turns", 1, False),
    ("timeout_s", 0, True),
    ("score_timeout_s", 0, True),
    ("context_budget", 1, False),
    ("max_concurrent", 1, False),
    ("grace_s", 0, False),
    ("max_failures", 0, False),
    ("max_sampled_tokens", 1, False),
    ("max_cost", 0, True),
    ("max_time_s", 0, True),
    ("enough_groups", 1, False),
    ("price_in", 0, False),
    ("price_out", 0, False),
)
# May differ when a collection is resumed: where and how fast it runs, and what it writes besides the rollouts.
_FREE = frozenset(
    {
        *("engines", "model", "engine_key", "engine_retry_s", "engine_limit", "logprob_kind"),
        *("routed_experts", "kept_ids", "constrain"),
        *("host", "public_url", "admin_key"),
        *("sandbox", "sandbox_network", "sandbox_read", "container", "pass_env"),
        *("capture", "trace_fraction", "with_records", "with_fates", "max_concurrent", "grace_s"),
        *("score_timeout_s", "max_failures", "accept_changed_tasks"),
        *("max_sampled_tokens", "max_cost", "max_time_s", "enough_groups", "price_in", "price_out"),
    }
)
