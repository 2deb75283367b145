"""The flight recorder for LLM reinforcement learning.

Record:

    tape = rolltape.open("runs/exp1")               # creates the run if there is none
    with tape.rollout(task_id="t1", step=0) as rollout:
        rollout.session().record_turn(…)            # prompt, reply, ids, logprobs
        rollout.finish(reward=1.0)

Read, also while the run is being written:

    run = rolltape.read("runs/exp1")
    for rollout in run.rollouts(step=0):
        made = rolltape.linearize(rollout, "exact")  # samples and ledger under a cut policy
        print(made.ledger.totals())

Train on whole groups as they complete:

    for group in tape.groups(step=0):
        …

What is where:

    record      open, Tape, RolloutRecorder, SessionRecorder, Durability, Gateway
    collect     Collector, CollectSettings, ContainerSettings, Environment
    read        read, Run, Rollout, Turn, seal, prune
    look        tree_of, forks_of, trace_of, Trace, TraceWriter, traces_from_batch
    cut         linearize, Linearized, CutPolicy, cut_policy, compare, Comparison, Sample, Ledger, Fate, show
    train       Credit, samples_of_group, Group, RunAheadLimit
    export      samples_to_jsonl, samples_to_parquet, read_samples, and the same for turns, rollouts, and traces
    tokens      TokenExporter, TokenRecord
    track       wandb_sink, mlflow_sink, otel_sink, tensorboard_sink, trackio_sink, jsonl_sink, show_step, show_batch
    errors      RolltapeError; the tree is in rolltape.errors
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from rolltape.errors import RolltapeError
from rolltape.renamed import renamed

if TYPE_CHECKING:
    from rolltape.collect.collector import Collector
    from rolltape.collect.environments.protocol import Environment
    from rolltape.collect.sandboxes.container_settings import ContainerSettings
    from rolltape.collect.settings import CollectSettings
    from rolltape.export import (
        read_rollouts,
        read_samples,
        read_traces,
        read_turns,
        rollouts_to_jsonl,
        rollouts_to_parquet,
        samples_to_jsonl,
        samples_to_parquet,
        traces_to_jsonl,
        turns_to_jsonl,
        turns_to_parquet,
    )
    from rolltape.gateway.gateway import Gateway
    from rolltape.groups import Group, RunAheadLimit
    from rolltape.records.policy import Credit, CutPolicy, cut_policy
    from rolltape.records.policy import Policy as Policy
    from rolltape.records.policy import policy as policy
    from rolltape.records.rollout import Rollout
    from rolltape.records.sample import Fate, Ledger, Sample
    from rolltape.records.token_record import TokenRecord
    from rolltape.records.trace import Trace
    from rolltape.records.turn import Turn
    from rolltape.samples import Linearized, linearize, samples_of_group
    from rolltape.samples.compare import Comparison, compare
    from rolltape.samples.spelling import show
    from rolltape.samples.summary import open_for_recording as open  # noqa: A004 - rolltape.open is its public name
    from rolltape.tape.journal.writing import Durability
    from rolltape.tape.recording.rollout import RolloutRecorder
    from rolltape.tape.recording.session import SessionRecorder
    from rolltape.tape.recording.tape import Tape
    from rolltape.tape.run import Run, read
    from rolltape.tape.shards.prune import prune
    from rolltape.tape.shards.seal import seal
    from rolltape.tokens import TokenExporter
    from rolltape.traces import TraceWriter, trace_of
    from rolltape.tracking import (
        jsonl_sink,
        mlflow_sink,
        otel_sink,
        show_batch,
        show_step,
        tensorboard_sink,
        traces_from_batch,
        trackio_sink,
        wandb_sink,
    )
    from rolltape.tree import forks_of, tree_of

__version__ = "0.2.0"

# Loaded on first use: a program that only records need not wait for the modules that read Parquet.
_MODULES = {
    "rolltape.collect.collector": "Collector",
    "rolltape.collect.environments.protocol": "Environment",
    "rolltape.collect.sandboxes.container_settings": "ContainerSettings",
    "rolltape.collect.settings": "CollectSettings",
    "rolltape.export": "read_rollouts read_samples read_traces read_turns rollouts_to_jsonl rollouts_to_parquet "
    "samples_to_jsonl samples_to_parquet traces_to_jsonl turns_to_jsonl turns_to_parquet",
    "rolltape.gateway.gateway": "Gateway",
    "rolltape.groups": "Group RunAheadLimit groups=",
    "rolltape.records.policy": "Credit CutPolicy Policy cut_policy policy",
    "rolltape.records.rollout": "Rollout",
    "rolltape.records.sample": "Fate Ledger Sample",
    "rolltape.records.token_record": "TokenRecord",
    "rolltape.records.trace": "Trace",
    "rolltape.records.turn": "Turn",
    "rolltape.samples": "Linearized linearize samples_of_group",
    "rolltape.samples.compare": "Comparison compare",
    "rolltape.samples.summary": "open=open_for_recording",
    "rolltape.samples.spelling": "show",
    "rolltape.tape.journal.writing": "Durability",
    "rolltape.tape.recording.rollout": "RolloutRecorder",
    "rolltape.tape.recording.session": "SessionRecorder",
    "rolltape.tape.recording.tape": "Tape",
    "rolltape.tape.run": "Run read",
    "rolltape.tape.shards.prune": "prune",
    "rolltape.tape.shards.seal": "seal",
    "rolltape.tokens": "TokenExporter",
    "rolltape.traces": "TraceWriter trace_of",
    "rolltape.tracking": "jsonl_sink mlflow_sink otel_sink show_batch show_step tensorboard_sink traces_from_batch "
    "trackio_sink wandb_sink",
    "rolltape.tree": "forks_of tree_of",
}
__getattr__ = renamed(__name__, {"Policy": "CutPolicy and Credit", "Room": "RunAheadLimit"}, lazy=_MODULES)

__all__ = [
    "CollectSettings",
    "Collector",
    "Comparison",
    "ContainerSettings",
    "Credit",
    "CutPolicy",
    "Durability",
    "Environment",
    "Fate",
    "Gateway",
    "Group",
    "Ledger",
    "Linearized",
    "Rollout",
    "RolloutRecorder",
    "RolltapeError",
    "Run",
    "RunAheadLimit",
    "Sample",
    "SessionRecorder",
    "Tape",
    "TokenExporter",
    "TokenRecord",
    "Trace",
    "TraceWriter",
    "Turn",
    "__version__",
    "compare",
    "cut_policy",
    "forks_of",
    "jsonl_sink",
    "linearize",
    "mlflow_sink",
    "open",
    "otel_sink",
    "prune",
    "read",
    "read_rollouts",
    "read_samples",
    "read_traces",
    "read_turns",
    "rollouts_to_jsonl",
    "rollouts_to_parquet",
    "samples_of_group",
    "samples_to_jsonl",
    "samples_to_parquet",
    "seal",
    "show",
    "show_batch",
    "show_step",
    "tensorboard_sink",
    "trace_of",
    "traces_from_batch",
    "traces_to_jsonl",
    "trackio_sink",
    "tree_of",
    "turns_to_jsonl",
    "turns_to_parquet",
    "wandb_sink",
]


def __dir__() -> list[str]:
    """The public names, for help() and completion; TokenExporter only where torch is installed."""
    missing = {"TokenExporter"} if find_spec("torch") is None else set()
    return sorted({*globals(), *__all__} - missing)
