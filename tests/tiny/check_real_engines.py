"""Check that real vLLM and SGLang give the tiny engine's logprobs on the same checkpoint.

    python tests/tiny/check_real_engines.py [--model FOLDER] [--engine sglang|vllm]

Each engine that is installed is started on the CPU or GPU that it finds, and held to the checks of `rolltape doctor`,
with exact logprobs. What is not installed is said, and is no failure unless it was named.
"""

import argparse
import asyncio
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from engines.check_real_backends import checked
from rolltape.tiny import shipped_model

READY_TIMEOUT_S = 600


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


def sglang_command(folder: Path, port: int) -> list[str]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--port", str(port)]
    command += ["--dtype", "float32", "--disable-cuda-graph", "--attention-backend", "torch_native"]
    return [*command, "--sampling-backend", "pytorch", *([] if has_gpu() else ["--device", "cpu"])]


def vllm_command(folder: Path, port: int) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--served-model-name", "it"]
    return [*command, "--enable-prompt-tokens-details"]


def has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


ENGINES: dict[str, Callable[[Path, int], list[str]]] = {"sglang": sglang_command, "vllm": vllm_command}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=None, help="a Qwen3 checkpoint; by default the shipped one")
    parser.add_argument("--engine", action="append", choices=list(ENGINES), help="by default each that is installed")
    asked = parser.parse_args()
    folder = shipped_model() if asked.model is None else asked.model
    failed = False
    for name in asked.engine or ENGINES:
        if find_spec(name) is None:
            print(f"{name}: not installed here")
            failed |= asked.engine is not None
            continue
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with tempfile.TemporaryDirectory() as scratch, running(ENGINES[name](folder, port), url, Path(scratch) / "log"):
            failed |= asyncio.run(checked([f"{name}:{url}"], folder)) > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
