"""What a collection is asked to do, and which of it must stay the same when it is resumed."""

from typing import Any

import msgspec

from rolltape.collect.environments.judge import Judge
from rolltape.gateway.exchange import SamplingParams
from rolltape.gateway.prompts.chat import Retention
from rolltape.records.turn import LogprobKind
from rolltape.traces.capture import Capture


class CollectSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks × attempts, by whom, and within which limits."""

    source: str
    split: str | None = None
    source_name: str | None = None  # None: the file's own name
    limit: int | None = None
    seed: int | None = None  # of the shuffle; None: tasks in their order
    environment: str = "problem"  # of tasks that name none
    agent: str = "chat"
    engines: tuple[str, ...] = ("embedded",)
    model: str | None = None  # a folder with the tokenizer, or a name; None: the embedded engine's own
    model_name: str | None = None  # in the record; None: the engine's, or the name that `model` is
    engine_key: str | None = None  # of engines at an address; on no record
    logprob_kind: LogprobKind | None = None  # None: as the engine has it
    routed_experts: bool = False
    renderer: str | None = None  # None: found by the model's own template
    judge: Judge | None = None  # for what tasks do not say of theirs
    group_size: int = 8
    step: int = 0
    max_turns: int = 16
    timeout_s: float = 600.0
    sampling: SamplingParams = SamplingParams(temperature=1.0)  # whatever the agent says
    thinking: bool | None = None
    thinking_retention: Retention | None = None
    context_budget: int | None = None
    allowed_tools: tuple[str, ...] | None = None
    denied_tools: tuple[str, ...] = ()
    capture: Capture = Capture.ALL
    trace_fraction: float | None = None  # of rollouts that are traced, where `capture` is SAMPLED
    with_records: bool = False  # results carry the whole record
    with_fates: bool = False  # and where sampled tokens go
    max_concurrent: int = 32
    grace_s: float = 20.0  # that attempts may go on when they are told to end

    def to_be_kept(self, source_name: str) -> dict[str, Any]:
        """What decides which rollouts there are and how they come about: not to differ when a run is resumed.

        Of the source that is its name, which is in the ids; where it lies may change.
        """
        # As the tape gives it back: a tuple is a list there.
        kept = {name: getattr(self, name) for name in self.__struct_fields__ if name not in _FREE}
        kept |= {"source": source_name, "judge": None if self.judge is None else self.judge.model}
        given: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(kept))
        return given

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "engine_key")
        return f"CollectSettings({', '.join(shown)})"


# May differ between the parts of one collection: where it runs, how fast, and what is written down beside.
_FREE = frozenset(
    {
        "engines",
        "model",
        "engine_key",
        "logprob_kind",
        "routed_experts",
        "capture",
        "trace_fraction",
        "with_records",
        "with_fates",
        "max_concurrent",
        "grace_s",
    }
)
