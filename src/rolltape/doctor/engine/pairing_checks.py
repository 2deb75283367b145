"""Checks of an engine and a model folder together: whether the engine serves the model of this folder."""

import asyncio
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from rolltape.doctor.engine.local_pass import Scorer, Scores, local_scorer, why_no_pass
from rolltape.doctor.engine.probing import EngineProbe, SampledChunks
from rolltape.doctor.results import CheckResult, fault, note, ok, warning
from rolltape.errors import CheckpointError, EngineFault
from rolltape.gateway.engines.http import Connections
from rolltape.gateway.prompts import ChatPrompts

_ALIKE = 0.85  # share of equal characters: engines decode ids one by one, and differ in spaces
# Nats, on average over sampled ids: the largest difference by half precision, and the least of other weights.
_EQUAL = 0.05
_OTHER = 0.3
_PROMPTS = 3
_REPLY = 48  # tokens


async def check_tokenizer(
    probe: EngineProbe, *, prompts: ChatPrompts, kind: str, url: str, api_key: str | None
) -> CheckResult | None:
    """Whether the engine and the folder make the same text of the same ids; None if the engine returns no text."""
    if kind not in _TEXT_KINDS:
        return None
    model = (await probe.engine.facts()).model
    spelled = []
    for _ in range(_PROMPTS):
        async with asyncio.timeout(probe.reply_timeout_s):
            spelled.append(await _spelled_reply(kind, url, probe.noise(48), api_key=api_key, model=model))
    ids = [token for one in spelled for token in one.ids]
    if any(one.text is None for one in spelled):
        return note("not compared: the engine gives ids without text")
    stops = [prompts.decode(np.array([one], dtype=np.int32)) for one in probe.stop_ids]
    theirs = _joined([one.text or "" for one in spelled], stops)
    own = _joined([prompts.decode(np.array(one.ids, dtype=np.int32)) for one in spelled], stops)
    if not ids:
        return None
    alike = SequenceMatcher(None, theirs, own, autojunk=False).ratio()
    if alike >= _ALIKE:
        return ok(f"the engine and the folder decode the same text from {len(ids)} ids", alike=round(alike, 3))
    return fault(
        f"{len(ids)} ids are {_short(theirs)} to the engine, and {_short(own)} by the folder",
        "give --model the folder of the model that the engine serves",
        alike=round(alike, 3),
    )


def _joined(texts: Sequence[str], stops: Sequence[str]) -> str:
    """The texts of replies in a comparable form.

    Engines keep the stop id at the end of a reply in the text, in the ids, in both, or in neither. Programs write an
    incomplete character at the end of a reply in different ways.
    """
    ended = (next((text.removesuffix(stop) for stop in stops if stop and text.endswith(stop)), text) for text in texts)
    return "".join(ended).replace("\ufffd", "")


async def check_weights(probe: EngineProbe, *, folder: Path) -> CheckResult:
    """Whether the engine's logprobs are those of a forward pass of the folder's weights on this machine."""
    why = why_no_pass(folder)
    if why is not None:
        return note(f"not compared with a local forward pass: {why}")
    try:
        async with local_scorer(folder) as score:
            differences = await _differences(probe, score)
    except CheckpointError as error:
        return warning(
            f"not compared: the folder's weights cannot be loaded here: {error}",
            "see that the folder is complete; the engine is not to blame for this",
        )
    if not len(differences):
        return note("not compared with a local forward pass: the engine gave no logprobs")
    mean, largest = float(differences.mean()), float(differences.max())
    measured = (
        f"{len(differences)} sampled ids against a local forward pass: {mean:.2g} nats off, at most {largest:.2g}"
    )
    figures = {"mean": mean, "largest": largest, "ids": len(differences)}
    if mean <= _EQUAL:
        return ok(measured, **figures)
    if mean <= _OTHER:
        return warning(measured, "see whether the engine quantizes; correct for it with importance weights", **figures)
    return fault(
        measured, "the engine serves other weights than the folder has; give the folder that it serves", **figures
    )


async def _differences(probe: EngineProbe, score: Scorer) -> Scores:
    """The differences of the engine's logprobs from the local pass, at temperature 1, where all kinds are equal."""
    found = []
    for at in range(_PROMPTS):
        prompt = probe.noise(48)
        streamed = SampledChunks() if at == 0 and probe.engine.streams else None  # to test the code for streams too
        given = await probe.sample(prompt, temperature=1.0, max_tokens=_REPLY, on_sampled=streamed)
        if given.logprobs is not None and len(given.ids):
            found.append(np.abs(await score(prompt, given.ids.tolist()) - given.logprobs))
    joined: Scores = np.concatenate([np.empty(0), *found])
    return joined[~np.isnan(joined)]


def _short(text: str) -> str:
    return repr(text if len(text) <= 24 else f"{text[:24]}…")


class SpelledReply(NamedTuple):
    """Sampled ids and the engine's own text of them."""

    ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    text: str | None  # None if it returns none, as SGLang with --skip-tokenizer-init


async def _spelled_reply(
    kind: str, url: str, prompt_ids: Sequence[int], *, api_key: str | None = None, model: str | None = None
) -> SpelledReply:
    """Sampled ids with the text that an engine of one of _TEXT_KINDS makes of them; raises EngineError."""
    path, body, read = _TEXT_KINDS[kind](list(prompt_ids), model)
    http = Connections(url, f"{kind} {url}", api_key=api_key)
    try:
        answer = await http.post(path, msgspec.json.encode(body))
        return msgspec.convert(tuple(read(msgspec.json.decode(answer))), SpelledReply)
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        raise EngineFault(f"{kind} {url}: {path} answered in an unknown form: {error!r}") from None
    finally:
        await http.close()


_Request = tuple[str, dict[str, Any], Callable[[Any], SpelledReply]]  # path, body, and how to read the answer


def _sglang(prompt_ids: list[int], model: str | None) -> _Request:
    params = {"max_new_tokens": _REPLY, "skip_special_tokens": False, "no_stop_trim": True}
    body = {"input_ids": prompt_ids, "sampling_params": params, "return_logprob": True}

    def read(answer: Any) -> SpelledReply:
        return SpelledReply([token for _, token, _ in answer["meta_info"]["output_token_logprobs"]], answer.get("text"))

    return "/generate", body, read


def _vllm(prompt_ids: list[int], model: str | None) -> _Request:
    body = {"model": model, "prompt": prompt_ids, "max_tokens": _REPLY, "temperature": 1.0}
    body |= {"return_token_ids": True, "skip_special_tokens": False, "include_stop_str_in_output": True}

    def read(answer: Any) -> SpelledReply:
        choice = answer["choices"][0]
        return SpelledReply(choice["token_ids"], choice["text"])

    return "/v1/completions", body, read


def _llamacpp(prompt_ids: list[int], model: str | None) -> _Request:
    body = {"prompt": prompt_ids, "n_predict": _REPLY, "return_tokens": True}
    return "/completion", body, lambda answer: SpelledReply(answer["tokens"], answer["content"])


_TEXT_KINDS: dict[str, Callable[[list[int], str | None], _Request]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "llamacpp": _llamacpp,
}
