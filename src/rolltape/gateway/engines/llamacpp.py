"""llama.cpp's server, `/completion`: ids in; ids and raw logprobs out.

Replies are not streamed: a stream leaves out every id whose text is not a complete character. The complete answer has
all ids, and only lacks the logprobs of those.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from rolltape.errors import EngineFault
from rolltape.gateway.engines.http import HttpEngine, decoded
from rolltape.gateway.engines.protocol import EngineFacts, Generated, Generation
from rolltape.gateway.engines.sampled import parse_finish, sampled_ids, sampled_logprobs, sampling_fields
from rolltape.gateway.request import SamplingParams
from rolltape.gateway.turn.constraints import Ability
from rolltape.records.turn import NO_IDS, Finish, LogprobKind

# Temperature first, as in other engines; by default llama.cpp applies it last. Other samplers are left out.
_SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")
# The largest value means a random seed.
_SEEDS = 2**32 - 1
_FINISHES = {"eos": Finish.STOP, "word": Finish.STOP_STRING, "limit": Finish.LENGTH}


class _CompletionProbability(msgspec.Struct):
    id: int
    logprob: float | None = None


class _Timings(msgspec.Struct, frozen=True):
    cache_n: int | None = None


class _Completion(msgspec.Struct):
    stop_type: str
    tokens: list[int]
    tokens_evaluated: int
    truncated: bool = False
    stopping_word: str = ""
    completion_probabilities: list[_CompletionProbability] = []
    timings: _Timings = _Timings()


class _DefaultSettings(msgspec.Struct, frozen=True):
    n_ctx: int | None = None


class _Props(msgspec.Struct):
    default_generation_settings: _DefaultSettings = _DefaultSettings()
    model_alias: str | None = None
    model_path: str | None = None


_ANSWER = msgspec.json.Decoder(_Completion)
_PROPS = msgspec.json.Decoder(_Props)


class LlamaCppEngine(HttpEngine):
    """One llama.cpp server. It reports no weight version, and returns nothing of an aborted reply.

    It stops only at the model's own end-of-turn ids; at any other stop id the reply is cut here.
    """

    token_faithful = True
    applies = frozenset(SamplingParams.__struct_fields__)
    abilities = frozenset({Ability.JSON_SCHEMA})
    streams = False

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        super().__init__("llamacpp", url, api_key)

    async def facts(self) -> EngineFacts:
        await self._http.check_health("llama.cpp")
        props = decoded(await self._http.get("/props"), _PROPS, f"{self.name} /props")
        return EngineFacts(model=props.model_alias or props.model_path, context=props.default_generation_settings.n_ctx)

    async def generate(self, wanted: Generation) -> Generated:
        body = msgspec.json.encode(_body(wanted))
        data = await self._run(wanted.id, self._http.post("/completion", body))
        if data is None:
            return Generated(ids=NO_IDS, logprobs=None, finish=Finish.ABORT)
        where = f"{self.name}, generation {wanted.id}"
        return _generated(wanted, decoded(data, _ANSWER, where), where)


def _body(wanted: Generation) -> dict[str, Any]:
    fields = sampling_fields(wanted.sampling, max_tokens="n_predict", repetition_penalty="repeat_penalty")
    if "seed" in fields:
        fields["seed"] %= _SEEDS
    return {
        "prompt": wanted.ids_json.encoded(wanted.prompt_ids),
        "stop": (),
        **fields,
        "top_k": wanted.sampling.top_k or 0,
        "samplers": _SAMPLERS,
        "repeat_last_n": len(wanted.prompt_ids) + fields["n_predict"],  # all, in a form that every version accepts
        "return_tokens": True,
        "n_probs": 1,
        "post_sampling_probs": False,
        "cache_prompt": True,
        **({} if wanted.constraint is None else {"json_schema": wanted.constraint.schema}),
    }


def _generated(wanted: Generation, answer: _Completion, where: str) -> Generated:
    if answer.truncated or answer.tokens_evaluated != len(wanted.prompt_ids):
        raise EngineFault(
            f"{where}: it read {answer.tokens_evaluated} ids of a prompt of {len(wanted.prompt_ids)}"
            f"{', cut to fit' if answer.truncated else ''}; give it a larger context"
        )
    logprobs = placed(answer.tokens, answer.completion_probabilities, where)
    finish = parse_finish(answer.stop_type, _FINISHES, where)
    end = next((at + 1 for at, token in enumerate(answer.tokens) if token in wanted.stop_ids), None)
    if end is not None:
        finish = Finish.STOP
    ids = sampled_ids(answer.tokens[:end], where)
    return Generated(
        ids=ids,
        logprobs=sampled_logprobs(logprobs[:end], ids, where),
        finish=finish,
        stop_string=answer.stopping_word if finish is Finish.STOP_STRING else None,
        logprob_kind=LogprobKind.RAW,
        cached_tokens=answer.timings.cache_n,
        constrained=wanted.constraint is not None,
    )


def placed(tokens: Sequence[int], entries: Sequence[_CompletionProbability], where: str) -> list[float | None]:
    """The logprob of each token; None if its entry is missing, or could belong to another token.

    Entries are in order. An entry is certain if its leftmost possible place is also its rightmost.
    """
    first = _places(tokens, [entry.id for entry in entries])
    last = _places(tokens[::-1], [entry.id for entry in reversed(entries)])
    if first is None or last is None:
        raise EngineFault(f"{where}: {len(entries)} logprobs that are not those of its {len(tokens)} sampled ids")
    logprobs: list[float | None] = [None] * len(tokens)
    for entry, left, right in zip(entries, first, reversed(last), strict=True):
        if left == len(tokens) - 1 - right:
            logprobs[left] = entry.logprob
    return logprobs


def _places(tokens: Sequence[int], ids: Sequence[int]) -> list[int] | None:
    """The first place of each id after that of the previous one, or None if not all are found."""
    places: list[int] = []
    at = 0
    for wanted in ids:
        while at < len(tokens) and tokens[at] != wanted:
            at += 1
        if at == len(tokens):
            return None
        places.append(at)
        at += 1
    return places
