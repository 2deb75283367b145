"""Parse a Completions request, and requests to tokenize and detokenize. A prompt is kept as it came."""

from rolltape.errors import BadRequest
from rolltape.gateway.request import ChatRequest, GivenPrompt, SamplingParams, TokenDetails
from rolltape.gateway.wire.chat.request import read_prompt_parts
from rolltape.gateway.wire.fields import Fields, read_body
from rolltape.gateway.wire.openai import (
    HARMLESS,
    MOST_CHOICES,
    MOST_LIKELY,
    check_ids,
    read_ids,
    read_metadata,
    read_sampling,
    read_stop_ids,
    read_token_details,
    wants_usage,
)

_MAX_TOKENS = 16  # OpenAI's default
_FORMS = "give a text or a list of token ids"


def read_request(raw: bytes) -> ChatRequest:
    """The body of a request; raises BadRequest."""
    body, repaired = read_body(raw)
    _refuse_unservable(body)
    return ChatRequest(
        api="completions",
        model=body.name("model"),
        messages=[],
        prompt=_prompt(body),
        sampling=read_sampling(body, "max_tokens").over(SamplingParams(max_tokens=_MAX_TOKENS)),
        stop_ids=read_stop_ids(body),
        n=body.maybe_whole("n", least=1, most=MOST_CHOICES) or 1,
        token_details=_token_details(body),
        stream=body.maybe_flag("stream") or False,
        include_usage=wants_usage(body),
        metadata=read_metadata(body),
        repaired=repaired,
        ignored_params=body.all_ignored(*HARMLESS),  # last, since it names the unread fields
    )


def _refuse_unservable(body: Fields) -> None:
    if body.maybe_flag("echo"):
        body.refuse("echo", "put the prompt before the reply yourself; return_token_ids gives its ids")
    if body.maybe_text("suffix"):
        body.refuse("suffix", "a prompt is continued at its end alone; leave it out")
    if (best_of := body.maybe_whole("best_of", least=1)) is not None and best_of > (body.maybe_whole("n") or 1):
        body.refuse("best_of", "ask for n replies and choose among them")


def _prompt(body: Fields) -> GivenPrompt:
    given = body.get("prompt")
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        if len(given) > 1:
            raise BadRequest(f"prompt has {len(given)} prompts; send one request for each")
        given = given[0]
    add_special_tokens = body.maybe_flag("add_special_tokens") is not False
    if isinstance(given, str) and given:
        return GivenPrompt(text=given, add_special_tokens=add_special_tokens)
    if isinstance(given, list) and given:
        return GivenPrompt(ids=check_ids(given, "prompt"), add_special_tokens=False)
    return body.refuse("prompt", _FORMS)


def _token_details(body: Fields) -> TokenDetails:
    # It is a number of alternatives. Proxies that serve chat as well send `true`.
    wanted = body.get("logprobs")
    is_flag = wanted is None or isinstance(wanted, bool)
    alternatives = None if is_flag else body.maybe_whole("logprobs", least=0, most=MOST_LIKELY)
    return read_token_details(body, logprobs=wanted is True or alternatives is not None, top_logprobs=alternatives)


def read_tokenizing(raw: bytes) -> ChatRequest:
    """The body of a request for the ids of a prompt, which is a text, or messages and tools."""
    body, repaired = read_body(raw)
    model = body.maybe_text("model") or ""
    details = TokenDetails(ids=True, texts=body.maybe_flag("return_token_strs") or False)
    if body.get("messages") is None:
        prompt = GivenPrompt(
            text=body.text("prompt") or body.refuse("prompt", "give a text that is not empty"),
            add_special_tokens=body.maybe_flag("add_special_tokens") is not False,
        )
        return ChatRequest(api="completions", model=model, messages=[], prompt=prompt, token_details=details)
    if body.maybe_flag("continue_final_message"):
        body.refuse("continue_final_message", "a reply follows the last message and does not continue it")
    if body.maybe_flag("add_special_tokens"):
        body.refuse("add_special_tokens", "the chat template adds those that the model needs")
    parts = read_prompt_parts(body)
    opens_reply = body.maybe_flag("add_generation_prompt") is not False
    return ChatRequest(
        api="chat", model=model, **parts, token_details=details, opens_reply=opens_reply, repaired=repaired
    )


def read_detokenizing(raw: bytes) -> ChatRequest:
    """The body of a request for the text of ids."""
    body, _ = read_body(raw)
    prompt = GivenPrompt(ids=read_ids(body, "tokens"))
    return ChatRequest(api="completions", model=body.maybe_text("model") or "", messages=[], prompt=prompt)
