"""Check that real vLLM and SGLang give the tiny engine's logprobs on the same checkpoint.

    python tests/tiny/check_real_engines.py [--model FOLDER] [--engine sglang|vllm]

Each engine that is installed is started on the CPU or GPU that it finds, samples replies at temperature 1, and
the tiny engine scores the very ids. What is not installed is said, and is no failure unless it was named.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rolltape.tiny import Sampling, TinyEngine, shipped_model

TOLERANCE = 1e-3
READY_TIMEOUT_S = 600
PROMPTS = 4
REPLY_TOKENS = 200


class Sampled(NamedTuple):
    """Ids and raw logprobs that another engine gave."""

    ids: list[int]
    logprobs: list[float]


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


@contextmanager
def running(command: list[str], url: str, log: Path) -> Iterator[None]:
    """A server in a process of its own, ready when its health check answers."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            deadline = time.monotonic() + READY_TIMEOUT_S
            while True:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command[2]} did not get ready:\n{log.read_text(errors='replace')[-3000:]}")
                try:
                    with urllib.request.urlopen(f"{url}/health", timeout=10):
                        break
                except (urllib.error.URLError, OSError):
                    time.sleep(1)
            yield
        finally:
            os.killpg(process.pid, 15)
            process.wait(timeout=60)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
    return port


def from_sglang(folder: Path, prompts: list[list[int]], scratch: Path) -> list[Sampled]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--port", str(port)]
    command += ["--dtype", "float32", "--disable-cuda-graph", "--attention-backend", "torch_native"]
    command += ["--sampling-backend", "pytorch", *([] if has_gpu() else ["--device", "cpu"])]
    params = {"temperature": 1.0, "max_new_tokens": REPLY_TOKENS, "ignore_eos": True}
    sampled = []
    with running(command, url, scratch / "sglang.log"):
        for prompt in prompts:
            answer = post(f"{url}/generate", {"input_ids": prompt, "sampling_params": params, "return_logprob": True})
            values, ids, _ = zip(*answer["meta_info"]["output_token_logprobs"], strict=True)
            sampled.append(Sampled(list(ids), list(values)))
    return sampled


def from_vllm(folder: Path, prompts: list[list[int]], scratch: Path) -> list[Sampled]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--served-model-name", "it"]
    body = {"model": "it", "max_tokens": REPLY_TOKENS, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    sampled = []
    with running(command, url, scratch / "vllm.log"):
        for prompt in prompts:
            answer = post(f"{url}/v1/completions", {**body, "prompt": prompt, "return_token_ids": True})["choices"][0]
            sampled.append(Sampled(answer["token_ids"], answer["logprobs"]["token_logprobs"]))
    return sampled


def has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


ENGINES: dict[str, Callable[[Path, list[list[int]], Path], list[Sampled]]] = {"sglang": from_sglang, "vllm": from_vllm}


async def worst_difference(folder: Path, prompts: list[list[int]], sampled: list[Sampled]) -> float:
    """The largest difference of any token's logprob from the tiny engine's for the same ids."""
    worst = 0.0
    async with TinyEngine(folder) as engine:
        for prompt, theirs in zip(prompts, sampled, strict=True):
            scoring = Sampling(max_tokens=0, prompt_logprobs_from=len(prompt))
            ours = await engine.generate([*prompt, *theirs.ids], scoring)
            differences = np.abs(np.array(ours.prompt_logprobs, dtype=np.float64) - np.array(theirs.logprobs))
            worst = max(worst, float(differences.max()))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=None, help="a Qwen3 checkpoint; by default the shipped one")
    parser.add_argument("--engine", action="append", choices=list(ENGINES), help="by default each that is installed")
    asked = parser.parse_args()
    folder = shipped_model() if asked.model is None else asked.model
    vocab = TinyEngine(folder).config.vocab_size
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, length).tolist() for length in rng.integers(5, 200, PROMPTS)]
    failed = False
    for name in asked.engine or ENGINES:
        if find_spec(name) is None:
            print(f"{name}: not installed here")
            failed |= asked.engine is not None
            continue
        with tempfile.TemporaryDirectory() as scratch:
            sampled = ENGINES[name](folder, prompts, Path(scratch))
        worst = asyncio.run(worst_difference(folder, prompts, sampled))
        count = sum(len(one.ids) for one in sampled)
        fine = worst <= TOLERANCE
        failed |= not fine
        print(f"{name}: {count} sampled tokens, largest difference {worst:.2e} {'ok' if fine else 'TOO LARGE'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
