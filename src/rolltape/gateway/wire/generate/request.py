"""Parse a request to vLLM's `/inference/v1/generate`, as training clients send it."""

from rolltape.gateway.request import ChatRequest, GivenPrompt, TokenDetails
from rolltape.gateway.wire.fields import Fields, read_body
from rolltape.gateway.wire.openai import HARMLESS, MOST_CHOICES, MOST_LIKELY, read_ids, read_sampling, wants_usage

# About how the server works, and about text, which is not returned here.
_OF_THE_SERVER = ("request_id", "cache_salt", "priority", "assistant_tokens_mask", "token_offsets")
_OF_TEXT = ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "detokenize")


def read_request(raw: bytes) -> ChatRequest:
    """The body of a request; raises BadRequest."""
    body, repaired = read_body(raw)
    for media in ("features", "content_parts"):
        if body.get(media):
            body.refuse(media, "images and the like are not supported; send token ids alone")
    params = body.object("sampling_params")
    return ChatRequest(
        api="generate",
        model=body.maybe_text("model") or "",
        messages=[],
        prompt=GivenPrompt(ids=read_ids(body, "token_ids"), add_special_tokens=False),
        sampling=read_sampling(params, "max_tokens"),
        stop_ids=tuple(read_ids(params, "stop_token_ids") if params.get("stop_token_ids") else ()),
        n=params.maybe_whole("n", least=1, most=MOST_CHOICES) or 1,
        token_details=_token_details(body, params),
        stream=body.maybe_flag("stream") or False,
        include_usage=wants_usage(body),
        repaired=repaired,
        ignored_params=_ignored_params(body, params),  # last, since it names the unread fields
    )


def _token_details(body: Fields, params: Fields) -> TokenDetails:
    wanted = params.maybe_whole("logprobs", least=0, most=MOST_LIKELY)
    return TokenDetails(
        ids=body.maybe_flag("return_token_ids") or False,  # of the prompt; the reply's are always sent
        logprobs=wanted is not None,
        top_logprobs=0 if wanted in (None, 1) else wanted,  # the first one sent is the sampled one
        tokens_as_ids=True,
    )


def _ignored_params(body: Fields, params: Fields) -> tuple[str, ...]:
    params.skip(*_OF_TEXT, "routed_experts_prompt_start", "output_kind")
    params.ignore_unread()
    return body.all_ignored(*HARMLESS, *_OF_THE_SERVER)
