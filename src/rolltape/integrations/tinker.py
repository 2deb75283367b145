"""Tinker: its sampling client is the engine behind the gateway, and groups become its `Datum`s.

    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model="Qwen/Qwen3-8B").result()
    sampler = training.save_weights_and_get_sampling_client()
    live = TinkerGroups("runs/exp1", collect=settings, sampler=sampler)
    for step, tasks in enumerate(batches):
        groups = live.request(tasks, step=step).wait()
        training.forward_backward(group_datums(groups), "importance_sampling").result()
        training.optim_step(tinker.AdamParams(learning_rate=1e-5)).result()
        live.use(training.save_weights_and_get_sampling_client(), str(step + 1))
        for group in groups:
            group.done()

Install it with `pip install tinker`.
"""

import asyncio
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any, TypedDict, Unpack

from rolltape.collect.settings import CollectSettings
from rolltape.errors import EngineFault
from rolltape.export.formats import tinker as form
from rolltape.export.formats.fitting import fitted
from rolltape.gateway.engines.function import FunctionEngine
from rolltape.gateway.engines.protocol import TOP_LOGPROBS, EngineFacts, Generated, Generation
from rolltape.gateway.engines.sampled import FINISHES, parse_finish, sampled_ids, sampled_logprobs, top_side_arrays
from rolltape.groups import Group
from rolltape.integrations.live import LiveGroups
from rolltape.records.policy import Credit, CutPolicy
from rolltape.records.turn import LogprobKind
from rolltape.tape.recording.tape import Tape

try:
    import tinker
except ModuleNotFoundError as missing:  # pragma: no cover - the tests have it
    if missing.name != "tinker":
        raise  # it is installed, and something it needs is missing
    raise ImportError("rolltape.integrations.tinker needs Tinker's SDK; pip install tinker") from missing


class GroupChoices(TypedDict, total=False):
    """The arguments of `LiveGroups` besides the run, what to collect, and the engine."""

    policy: CutPolicy | str
    credit: Credit | None
    consumer: str
    max_staleness: int | None


class TinkerEngine(FunctionEngine):
    """Samples with Tinker's sampling client: token ids in, token ids and logprobs out.

    Example:

        engine = TinkerEngine(service.create_sampling_client(base_model="Qwen/Qwen3-8B"), model="Qwen/Qwen3-8B")

    A plain sampling client never changes its weights. `use` replaces it by another client: replies in flight end with
    the client that they began with, and each reply has the version of its own client on the tape.
    Tinker's `kind="inflight"` clients change weights while they sample and do not report when: their versions are
    wrong.

    Tinker stops at token ids or at texts, not at both, so `stop` texts of agents are not applied.
    """

    def __init__(
        self, client: Any, *, version: str | None = None, model: str | None = None, context: int | None = None
    ):
        """Wrap a sampling client; nothing is sampled yet.

        Arguments:
            client: A `tinker.SamplingClient`, or Tinker's future of one, which is waited for.
            version: The weight version that the client has. None: the version that is announced to the gateway.
            model: The model's name in the record.
            context: The most tokens of prompt and reply together.
        """
        applies = ("temperature", "top_p", "top_k", "seed", "max_tokens", TOP_LOGPROBS)
        super().__init__(self._sample, name="Tinker's sampling client", model=model, context=context, applies=applies)
        self.loop = None  # Tinker's clients have their own event loop
        self.use(client, version)

    def use(self, client: Any, version: str | None) -> None:
        """Sample with another client from now on. A future of one is waited for."""
        ready = client.result() if isinstance(client, tinker.APIFuture) else client
        self._sampler: tuple[Any, str | None] = (ready, version)

    async def facts(self) -> EngineFacts:
        known = await super().facts()
        return EngineFacts(model=known.model, context=known.context, version=self._sampler[1])

    async def _sample(self, prompt_ids: list[int], wanted: Generation) -> Generated:
        client, version = self._sampler
        where = f"{self.name}, generation {wanted.id}"
        sampling = client.sample(
            prompt=tinker.ModelInput.from_ints(prompt_ids),
            num_samples=1,
            sampling_params=_sampling_params(wanted),
            topk_sample_logprobs=wanted.top_logprobs,
        )
        # Until 0.38, a future that only threads can wait for.
        response = await (sampling if isinstance(sampling, tinker.APIFuture) else asyncio.wrap_future(sampling))
        if len(response.sequences) != 1:
            raise EngineFault(f"{where}: one reply was asked for, but {len(response.sequences)} came")
        (reply,) = response.sequences
        ids = sampled_ids(reply.tokens, where)
        tops = [top or [] for top in reply.topk_logprobs or []]
        return Generated(
            ids=ids,
            logprobs=None if reply.logprobs is None else sampled_logprobs(reply.logprobs, ids, where),
            finish=parse_finish(reply.stop_reason, FINISHES, where),
            first_version=version,
            last_version=version,
            logprob_kind=_logprob_kind(wanted),
            cached_tokens=response.prompt_cache_hit_tokens,
            side_arrays=top_side_arrays(tops, ids, wanted, where),
        )


class TinkerGroups(LiveGroups):
    """`LiveGroups` in front of Tinker's sampling client. `use` sets the client with the new weights.

    Everything else is as in `LiveGroups`: evaluations have a separate split, and a checkpoint holds `state_dict` beside
    the path of `save_state`.
    """

    def __init__(
        self,
        tape: Tape | str | PathLike[str],
        *,
        collect: CollectSettings,
        sampler: Any,
        version: str = "0",
        model: str | None = None,
        context: int | None = None,
        **choices: Unpack[GroupChoices],
    ) -> None:
        """Name the run; nothing starts before the first request.

        Arguments:
            tape: The run, or its folder.
            collect: What to collect; `model` in it is the folder with the tokenizer.
            sampler: A `tinker.SamplingClient`, or Tinker's future of one, which is waited for.
            version: The weight version that it has: the number of the step, for example.
            model: The model's name in the record.
            context: The most tokens of prompt and reply together.
            choices: Arguments of `LiveGroups`: `policy`, `credit`, `consumer`, `max_staleness`.
        """
        self._sampling = TinkerEngine(sampler, version=version, model=model, context=context)
        super().__init__(tape, collect=collect, engine=self._sampling, version=version, **choices)

    def use(self, sampler: Any, version: str) -> None:
        """Sample with another client, which has this weight version. Replies in flight end with the earlier client."""
        self._sampling.use(sampler, version)
        self.announce(version)


def group_datums(groups: Iterable[Group]) -> list[Any]:
    """A `tinker.Datum` for each sample of groups, for the losses that use logprobs and advantages.

    The list is empty if no attempt has anything to train; `forward_backward` refuses an empty list, so skip the step.
    """
    samples = [sample for group in groups for sample in group.samples]
    return [_datum(form.row(sample)) for sample in fitted(samples, form.FORM)]


def _datum(row: dict[str, Any]) -> Any:
    inputs = {name: tinker.TensorData(**tensor) for name, tensor in row["loss_fn_inputs"].items()}
    return tinker.Datum(model_input=tinker.ModelInput.model_validate(row["model_input"]), loss_fn_inputs=inputs)


def _sampling_params(wanted: Generation) -> Any:
    given = wanted.sampling
    stop: Sequence[int] | None = list(wanted.stop_ids) or None  # None: Tinker stops at the model's own end
    return tinker.SamplingParams(
        max_tokens=given.max_tokens,
        seed=given.seed,
        stop=stop,
        temperature=1.0 if given.temperature is None else given.temperature,
        top_p=1.0 if given.top_p is None else given.top_p,
        top_k=-1 if given.top_k is None else given.top_k,
    )


def _logprob_kind(wanted: Generation) -> LogprobKind | None:
    """Tinker does not document the kind of its logprobs. At temperature 1 without truncation, all kinds agree."""
    given = wanted.sampling
    is_plain = given.temperature in (None, 1.0) and given.top_p in (None, 1.0) and given.top_k in (None, -1, 0)
    return LogprobKind.AFTER_TEMPERATURE if is_plain else None
