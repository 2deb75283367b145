"""verl's client as the engine behind the gateway."""

from typing import Any

from rolltape.gateway.engines.function import FunctionEngine
from rolltape.gateway.engines.protocol import Generated, Generation
from rolltape.gateway.engines.sampled import sampled_ids, sampled_logprobs
from rolltape.records.turn import Finish, LogprobKind


def client_engine(client: Any, logprob_kind: LogprobKind | str | None = None) -> FunctionEngine:
    """verl's `LLMServerClient` as an engine: its servers sample, and report the global step of their weights."""

    async def sample(prompt_ids: list[int], wanted: Generation) -> Generated:
        params = {
            "temperature": 1.0 if wanted.sampling.temperature is None else wanted.sampling.temperature,
            "top_p": 1.0 if wanted.sampling.top_p is None else wanted.sampling.top_p,
            "top_k": -1 if wanted.sampling.top_k is None else wanted.sampling.top_k,
            "max_tokens": wanted.sampling.max_tokens,
            "stop_token_ids": list(wanted.stop_ids),
            "logprobs": True,
        }
        output = await client.generate(wanted.session, prompt_ids=prompt_ids, sampling_params=params)
        where = f"verl's client, generation {wanted.id}"
        ids = sampled_ids([int(token) for token in output.token_ids], where)
        # verl reports "completed" both for a reply that stopped and for one that reached its limit.
        ended = Finish.STOP if len(ids) and int(ids[-1]) in wanted.stop_ids else Finish.LENGTH
        steps = [output.extra_fields.get(name) for name in ("min_global_steps", "max_global_steps")]
        first, last = (None if step is None else str(step) for step in steps)
        return Generated(
            ids=ids,
            logprobs=None if output.log_probs is None else sampled_logprobs(output.log_probs, ids, where),
            finish=Finish.ABORT if output.stop_reason in ("aborted", "abort") else ended,
            first_version=first,
            last_version=last,
            logprob_kind=None if logprob_kind is None else LogprobKind(logprob_kind),
        )

    engine = FunctionEngine(sample, name="verl's client")
    engine.loop = None  # Ray's handles work in any event loop, and the current loop may end before the training.
    return engine


def server_logprob_kind(rollout: Any, sampling: Any) -> LogprobKind | None:
    """The distribution of the logprobs of verl's servers."""
    if rollout.get("name") != "vllm":
        return LogprobKind.AFTER_TEMPERATURE if rollout.get("name") == "sglang" else None
    if rollout.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
        return LogprobKind.RAW
    truncates = sampling.top_p < 1 or sampling.top_k > 0
    return LogprobKind.AFTER_TRUNCATION if truncates else LogprobKind.AFTER_TEMPERATURE
