"""Bodies of Completions and of `/tokenize`: read, or refused by the path of what is wrong, and nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given, settings

from rolltape.errors import BadRequest
from rolltape.gateway.request import ChatRequest, GivenPrompt, TokenDetails
from rolltape.gateway.wire.completions import COMPLETIONS
from wire_bodies import broken, read_or_refused

FULL: dict[str, Any] = {
    "model": "tiny",
    "prompt": [1, 2, 3],
    "max_tokens": 5,
    "n": 2,
    "best_of": 2,
    "echo": False,
    "suffix": "",
    "logprobs": 1,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "add_special_tokens": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "metadata": {"a": "b"},
    "user": "ann",
}
MESSAGES = [{"role": "user", "content": "hi"}]


def read(**fields: Any) -> ChatRequest:
    return COMPLETIONS.read(json.dumps({"model": "tiny", "prompt": "go"} | fields).encode())


def test_a_request_is_read() -> None:
    ask = read(**FULL)
    assert ask.prompt == GivenPrompt(ids=[1, 2, 3], add_special_tokens=False)
    assert (ask.n, ask.stream, ask.include_usage, ask.sampling.max_tokens, ask.sampling.stop) == (
        2,
        True,
        True,
        5,
        ("x",),
    )
    assert ask.token_details == TokenDetails(ids=True, logprobs=True, top_logprobs=1, tokens_as_ids=True)
    assert ask.metadata == {"a": "b"}
    assert ask.ignored_params == ()
    assert read().prompt == read(prompt=["go"]).prompt == GivenPrompt(text="go")
    assert read(add_special_tokens=False).prompt == GivenPrompt(text="go", add_special_tokens=False)
    assert (read(stop_token_ids=[5]).stop_ids, read(stop_token_ids=[]).stop_ids) == ((5,), ())
    assert read(min_tokens=5).ignored_params == ("min_tokens: not known here; ignored",)


@pytest.mark.parametrize(("given", "wanted"), [(None, False), (False, False), (True, True), (0, True), (5, True)])
def test_logprobs_are_asked_for_by_a_number_or_a_flag(given: object, wanted: bool) -> None:
    assert read(logprobs=given).token_details.logprobs is wanted


@settings(max_examples=300, deadline=None)
@given(broken(FULL))
def test_a_broken_body_is_read_or_refused_and_never_raises_otherwise(raw: bytes) -> None:
    ask = read_or_refused(COMPLETIONS, raw)
    if ask is not None:
        assert ask.prompt is not None
        assert all(header.isascii() and header.isprintable() for header in ask.ignored_params)


@settings(max_examples=200, deadline=None)
@given(broken({"model": "tiny", "messages": MESSAGES, "tools": [], "add_generation_prompt": True, "tokens": [1, 2]}))
def test_a_broken_body_to_tokenize_is_read_or_refused(raw: bytes) -> None:
    for reader in (COMPLETIONS.read_tokenizing, COMPLETIONS.read_detokenizing):
        try:
            ask = reader(raw)
        except BadRequest:
            continue
        assert ask.messages or ask.prompt is not None
