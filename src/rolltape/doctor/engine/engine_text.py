"""What an engine itself decodes its ids to: the text beside the ids of a reply, in the API of each kind of engine."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from rolltape.errors import EngineFault
from rolltape.gateway.engines.http import Connections

_COUNT = 48


class SpelledReply(NamedTuple):
    """Sampled ids and the engine's own text of them."""

    ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    text: str | None  # None: it gives none, as SGLang with --skip-tokenizer-init


async def spelled_reply(
    kind: str, url: str, prompt_ids: Sequence[int], *, api_key: str | None = None, model: str | None = None
) -> SpelledReply:
    """Sampled ids with the text that an engine of one of TEXT_KINDS makes of them; raises EngineError."""
    path, body, read = TEXT_KINDS[kind](list(prompt_ids), model)
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
    params = {"max_new_tokens": _COUNT, "skip_special_tokens": False, "no_stop_trim": True}
    body = {"input_ids": prompt_ids, "sampling_params": params, "return_logprob": True}

    def read(answer: Any) -> SpelledReply:
        return SpelledReply([token for _, token, _ in answer["meta_info"]["output_token_logprobs"]], answer.get("text"))

    return "/generate", body, read


def _vllm(prompt_ids: list[int], model: str | None) -> _Request:
    body = {"model": model, "prompt": prompt_ids, "max_tokens": _COUNT, "temperature": 1.0}
    body |= {"return_token_ids": True, "skip_special_tokens": False, "include_stop_str_in_output": True}

    def read(answer: Any) -> SpelledReply:
        choice = answer["choices"][0]
        return SpelledReply(choice["token_ids"], choice["text"])

    return "/v1/completions", body, read


def _llamacpp(prompt_ids: list[int], model: str | None) -> _Request:
    body = {"prompt": prompt_ids, "n_predict": _COUNT, "return_tokens": True}
    return "/completion", body, lambda answer: SpelledReply(answer["tokens"], answer["content"])


TEXT_KINDS: dict[str, Callable[[list[int], str | None], _Request]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "llamacpp": _llamacpp,
}
