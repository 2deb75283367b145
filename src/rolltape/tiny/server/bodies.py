"""Parse SGLang's request bodies; unsupported parameters are refused by name."""

from typing import Any, NamedTuple, TypeVar

import msgspec

from rolltape.errors import EngineError, PromptError, SamplingError
from rolltape.tiny.engine import TinyEngine
from rolltape.tiny.sampling import Sampling

_Body = TypeVar("_Body")


class CustomParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The supported `custom_params`: those of SGLang with slime's patch."""

    return_top_p_token_ids: bool = False


class BodyError(EngineError):
    """A request body is not JSON, or does not have the expected shape."""


class SglangSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The supported `sampling_params`; null means absent."""

    max_new_tokens: int | None = 128
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # -1 for all
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    stream_interval: int | None = None  # ids per event, after the first event
    spaces_between_special_tokens: bool | None = None  # no effect on byte-level tokenizers
    custom_params: CustomParams | None = None


# Unsupported parameters, with the values that mean the same as leaving them out.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "min_p": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_new_tokens": (None, 0),
    **dict.fromkeys(("stop_regex", "json_schema", "regex", "ebnf", "structural_tag"), (None,)),
    "logit_bias": (None, {}),
}
_UNSUPPORTED_FIELDS = (
    "input_embeds",
    "image_data",
    "audio_data",
    "video_data",
    "token_ids_logprob",
    "lora_path",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "return_routed_experts",
)


class GenerateBody(msgspec.Struct, kw_only=True):
    """The body of `/generate`: one prompt, or a list of prompts with lists or single values of the other fields."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SglangSampling | list[SglangSampling] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False


class AbortBody(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool = False


class UpdateBody(msgspec.Struct, kw_only=True):
    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False


class VersionBody(msgspec.Struct, kw_only=True):
    new_version: str
    abort_all_requests: bool = False


class PauseBody(msgspec.Struct, kw_only=True):
    mode: str = "abort"


class PromptRequest(NamedTuple):
    """One prompt of a body, ready for the engine."""

    request_id: str | None
    prompt_ids: list[int]
    sampling: Sampling
    logprobs: bool
    logprob_start: int  # the first reported place of the prompt
    logprob_texts: bool
    skip_special: bool
    trim_stop: bool
    stream_interval: int


def decode(data: bytes, shape: type[_Body]) -> _Body:
    """Decode a JSON body of this shape; raises BodyError."""
    try:
        return msgspec.json.decode(data or b"{}", type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unexpected(error) from None


def decode_generate(data: bytes) -> GenerateBody:
    """Decode the body of `/generate`; raises BodyError or SamplingError, also for unsupported features."""
    given = decode(data, dict[str, Any])
    for name in _UNSUPPORTED_FIELDS:
        if given.get(name) not in (None, False, [], {}):
            raise BodyError(f"{name} is not supported by the tiny engine")
    params = given.get("sampling_params")
    for one in params if isinstance(params, list) else [params]:
        if isinstance(one, dict):
            _drop_unsupported(one)
    try:
        return msgspec.convert(given, GenerateBody)
    except msgspec.ValidationError as error:
        raise _unexpected(error) from None


def _drop_unsupported(params: dict[str, Any]) -> None:
    for name, harmless in _WITHOUT_EFFECT.items():
        value = params.pop(name, None)
        if value not in harmless:
            raise SamplingError(f"{name} {value!r} is not supported by the tiny engine")


def _unexpected(error: Exception) -> BodyError:
    return BodyError(f"the body is not as expected: {error}")


def parse_prompts(body: GenerateBody, engine: TinyEngine) -> tuple[list[PromptRequest], bool]:
    """The prompts of a body, and whether it has a list, so that the answer is a list too."""
    prompts, many = _prompts(body, engine)
    if not prompts:
        raise BodyError("the list of prompts is empty")
    count = len(prompts)
    params = _spread(body.sampling_params, count, many, "sampling_params")
    rids = [f"{body.rid}_{index}" for index in range(count)] if many and isinstance(body.rid, str) else body.rid
    ids = _spread(rids, count, many, "rid")
    given = [one for one in ids if one is not None]
    if len(set(given)) < len(given):
        raise BodyError("rid: each prompt needs its own")
    logprobs = _spread(body.return_logprob, count, many, "return_logprob")
    starts = _spread(body.logprob_start_len, count, many, "logprob_start_len")
    tops = _spread(body.top_logprobs_num, count, many, "top_logprobs_num")
    given_each = zip(prompts, params, ids, logprobs, starts, tops, strict=True)
    return [_prompt_request(body, engine, *one) for one in given_each], many


def _prompts(body: GenerateBody, engine: TinyEngine) -> tuple[list[list[int]], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise BodyError("give either text or input_ids")
    if body.text is not None:
        if engine.texts is None:
            raise PromptError("the model's folder has no tokenizer.json; give input_ids instead of text")
        texts = [body.text] if isinstance(body.text, str) else body.text
        return [engine.texts.encode(text) for text in texts], not isinstance(body.text, str)
    assert body.input_ids is not None
    rows = [row for row in body.input_ids if isinstance(row, list)]
    if not rows:
        return [[token for token in body.input_ids if isinstance(token, int)]], False
    if len(rows) != len(body.input_ids):
        raise BodyError("input_ids mixes ids and lists of ids")
    return rows, True


_Value = TypeVar("_Value")


def _spread(value: _Value | list[_Value] | None, count: int, many: bool, name: str) -> list[_Value | None]:
    """One value per prompt: from a list, or the same for all."""
    if not isinstance(value, list):
        return [value] * count
    if not many or len(value) != count:
        raise BodyError(f"{name} has {len(value)} entries for {count} prompts{'' if many else ', which is no list'}")
    return list(value)


def _prompt_request(
    body: GenerateBody,
    engine: TinyEngine,
    prompt: list[int],
    params: SglangSampling | None,
    request_id: str | None,
    logprobs: bool | None,
    start: int | None,
    top: int | None,
) -> PromptRequest:
    params = SglangSampling() if params is None else params
    # In SGLang -1 means the prompt's last id.
    start = max(len(prompt) - 1, 0) if start is None or start == -1 else start
    if not 0 <= start <= len(prompt):
        raise BodyError(f"logprob_start_len {start} for a prompt of {len(prompt)} ids")
    interval = 1 if params.stream_interval is None else params.stream_interval
    if interval < 1:
        raise BodyError(f"stream_interval {interval}; it is at least 1")
    return PromptRequest(
        request_id=request_id,
        prompt_ids=prompt,
        sampling=_sampling(params, engine, prompt_from=start if logprobs else None, top=(top or 0) if logprobs else 0),
        logprobs=bool(logprobs),
        logprob_start=start,
        logprob_texts=body.return_text_in_logprobs,
        skip_special=params.skip_special_tokens is not False,
        trim_stop=not params.no_stop_trim,
        stream_interval=interval,
    )


def _sampling(params: SglangSampling, engine: TinyEngine, *, prompt_from: int | None, top: int) -> Sampling:
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    # With ignore_eos SGLang ignores all stop ids, including requested ones.
    stop_ids = () if params.ignore_eos else (*engine.config.eos_ids, *(params.stop_token_ids or ()))
    return Sampling(
        temperature=1.0 if params.temperature is None else params.temperature,
        top_p=1.0 if params.top_p is None else params.top_p,
        top_k=None if params.top_k in (None, -1) else params.top_k,
        seed=params.sampling_seed,
        max_tokens=engine.context if params.max_new_tokens is None else params.max_new_tokens,
        stop_ids=stop_ids,
        stop_strings=tuple(stop for stop in stops if stop),
        top_logprobs=top,
        prompt_logprobs_from=prompt_from,
        kept_ids=params.custom_params is not None and params.custom_params.return_top_p_token_ids,
    )
