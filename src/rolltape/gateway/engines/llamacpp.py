"""llama.cpp's server, `/completion`: ids in; ids and raw logprobs out.

Not streamed: its stream leaves out every id whose text is not a whole character, while the whole answer has all
ids. There, only the logprobs of those ids are missing.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from rolltape.errors import EngineFault
from rolltape.gateway.engines.http import Connections, InFlight, decoded
from rolltape.gateway.engines.protocol import EngineFacts, Generated, Generation
from rolltape.gateway.engines.sampled import NEUTRAL, sampled_ids, sampled_logprobs
from rolltape.gateway.exchange import SamplingParams
from rolltape.records.tokens import NO_IDS
from rolltape.records.turn import Finish, LogprobKind

# Temperature first, as other engines have it; by default llama.cpp applies it last. All else is left out.
_SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")
# The largest one stands for a random seed.
_SEEDS = 2**32 - 1


class _Entry(msgspec.Struct):
    id: int
    logprob: float | None = None


class _Timings(msgspec.Struct):
    cache_n: int | None = None


class _Answer(msgspec.Struct):
    stop_type: str
    tokens: list[int]
    tokens_evaluated: int
    truncated: bool = False
    stopping_word: str = ""
    completion_probabilities: list[_Entry] = []
    timings: _Timings = msgspec.field(default_factory=_Timings)


class _Settings(msgspec.Struct):
    n_ctx: int | None = None


class _Props(msgspec.Struct):
    default_generation_settings: _Settings = msgspec.field(default_factory=_Settings)
    model_alias: str | None = None
    model_path: str | None = None


_ANSWER = msgspec.json.Decoder(_Answer)
_PROPS = msgspec.json.Decoder(_Props)


class LlamaCppEngine:
    """One llama.cpp server. It reports no weight version, and of an aborted reply it gives nothing.

    It ends by itself on the model's own end-of-turn ids alone; at any other stop id the reply is cut here.
    """

    token_faithful = True
    applies = frozenset(SamplingParams.__struct_fields__)

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.name = f"llamacpp {url}"
        self._http = Connections(
            url, self.name, headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        )
        self._in_flight = InFlight()

    async def facts(self) -> EngineFacts:
        await self._http.get("/health")
        props = decoded(await self._http.get("/props"), _PROPS, f"{self.name} /props")
        return EngineFacts(model=props.model_alias or props.model_path, context=props.default_generation_settings.n_ctx)

    async def generate(self, wanted: Generation) -> Generated:
        body = msgspec.json.encode(_body(wanted))
        data = await self._in_flight.run(wanted.id, self._http.post("/completion", body))
        if data is None:
            return Generated(ids=NO_IDS, logprobs=None, finish=Finish.ABORT)
        where = f"{self.name}, generation {wanted.id}"
        return _generated(wanted, decoded(data, _ANSWER, where), where)

    async def abort(self, generation_id: str) -> None:
        self._in_flight.abort(generation_id)

    async def close(self) -> None:
        await self._http.close()


def _body(wanted: Generation) -> dict[str, Any]:
    asked = wanted.sampling.over(NEUTRAL)
    body: dict[str, Any] = {
        "prompt": wanted.ids_json.encoded(wanted.prompt_ids),
        "n_predict": asked.max_tokens,
        "samplers": _SAMPLERS,
        "temperature": asked.temperature,
        "top_k": asked.top_k or 0,
        "top_p": asked.top_p,
        "min_p": asked.min_p,
        "repeat_penalty": asked.repetition_penalty,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repeat_last_n": len(wanted.prompt_ids) + (asked.max_tokens or 0),  # all, in a form that every version takes
        "stop": asked.stop or (),
        "return_tokens": True,
        "n_probs": 1,
        "post_sampling_probs": False,
        "cache_prompt": True,
    }
    if asked.seed is not None:
        body["seed"] = asked.seed % _SEEDS
    return body


def _generated(wanted: Generation, answer: _Answer, where: str) -> Generated:
    if answer.truncated or answer.tokens_evaluated != len(wanted.prompt_ids):
        raise EngineFault(
            f"{where}: it read {answer.tokens_evaluated} ids of a prompt of {len(wanted.prompt_ids)}"
            f"{', cut to fit' if answer.truncated else ''}; give it a larger context"
        )
    logprobs = placed(answer.tokens, answer.completion_probabilities, where)
    finish, stop_string = _finish(answer, where)
    end = next((at + 1 for at, token in enumerate(answer.tokens) if token in wanted.stop_ids), None)
    if end is not None:
        finish, stop_string = Finish.STOP, None
    ids = sampled_ids(answer.tokens[:end], where)
    return Generated(
        ids=ids,
        logprobs=sampled_logprobs(logprobs[:end], ids, where),
        finish=finish,
        stop_string=stop_string,
        logprob_kind=LogprobKind.RAW,
        cached_tokens=answer.timings.cache_n,
    )


def placed(tokens: Sequence[int], entries: Sequence[_Entry], where: str) -> list[float | None]:
    """The logprob of each token that certainly has one; None where entries are missing, or could be another's.

    Entries are in order, and an entry whose place counted from the left is its place counted from the right, too,
    can be nowhere else.
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
    """Where each of the ids is first found after the one before it; None: not all of them are."""
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


def _finish(answer: _Answer, where: str) -> tuple[Finish, str | None]:
    match answer.stop_type:
        case "eos":
            return Finish.STOP, None
        case "word":
            return Finish.STOP_STRING, answer.stopping_word
        case "limit":
            return Finish.LENGTH, None
        case other:
            raise EngineFault(f"{where}: it ended for the reason {other!r}; known are eos, word and limit")
