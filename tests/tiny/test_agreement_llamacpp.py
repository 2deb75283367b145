"""The engine's logprobs are those of llama.cpp on a float32 GGUF of the same checkpoint."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xllamacpp  # type: ignore[import-untyped, unused-ignore]

from rolltape.tiny import Sampling, TinyEngine, shipped_model
from tiny.gguf_file import write_gguf
from tiny.test_agreement_transformers import folders

TOLERANCE = 1e-3


def serve(file: Path) -> Any:
    """llama.cpp's server in this process, float32 throughout; it ends with the object."""
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx = 2048
    params.n_parallel = 1
    params.warmup = False
    params.verbosity = -1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    return xllamacpp.Server(params)


def complete(server: Any, prompt: list[int], **settings: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "return_tokens": True, "n_probs": 1, "samplers": ["temperature"]}
    request = urllib.request.Request(
        f"{server.listening_address}/completion",
        json.dumps({**body, **settings}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def logprobs_by_place(answer: dict[str, Any]) -> dict[int, float]:
    """llama.cpp leaves out tokens whose text is no whole character; the others are in order."""
    given: dict[int, float] = {}
    entries = iter(answer["completion_probabilities"])
    entry = next(entries, None)
    for place, token in enumerate(answer["tokens"]):
        if entry is not None and entry["id"] == token:
            given[place] = entry["logprob"]
            entry = next(entries, None)
    assert entry is None
    return given


@pytest.mark.parametrize("which", folders())
async def test_sampled_and_greedy_replies_agree(which: str, shaped: Path, tmp_path: Path) -> None:
    folder = shaped if which == "random" else shipped_model()
    server = serve(write_gguf(folder, tmp_path / "model.gguf"))
    rng = np.random.default_rng(1)
    compared = 0
    async with TinyEngine(folder, context=2048) as engine:
        for seed in range(60):
            prompt = rng.integers(10, 2000, 100).tolist()
            theirs = complete(server, prompt, n_predict=400, temperature=1.0, seed=seed)
            scored = await engine.generate(
                [*prompt, *theirs["tokens"]], Sampling(max_tokens=0, prompt_logprobs_from=len(prompt))
            )
            given = logprobs_by_place(theirs)
            ours = np.array(scored.prompt_logprobs, dtype=np.float64)
            np.testing.assert_allclose(ours[list(given)], list(given.values()), rtol=0, atol=TOLERANCE)
            compared += len(given)
            if compared > 500:
                break
        assert compared > 300

        greedy = complete(server, prompt, n_predict=100, temperature=0.0, samplers=["top_k"], top_k=1)
        reply = await engine.generate(prompt, Sampling(temperature=0, max_tokens=100))
        # llama.cpp may or may not give the id that ends the turn.
        shared = min(len(reply.ids), len(greedy["tokens"]))
        assert abs(len(reply.ids) - len(greedy["tokens"])) <= 1
        assert reply.ids[:shared].tolist() == greedy["tokens"][:shared]
        given = logprobs_by_place(greedy)
        np.testing.assert_allclose(reply.raw_logprobs[list(given)], list(given.values()), rtol=0, atol=TOLERANCE)
