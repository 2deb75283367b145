"""`rolltape engine` serves until it is told to end."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from rolltape.cli.record.engine import engine
from rolltape.errors import UsageError
from rolltape.records.turn import LogprobKind

RUN = "import pathlib, sys; from rolltape.cli.record.engine import *; engine(model=pathlib.Path(sys.argv[1]), port=0)"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
async def test_it_prints_its_address_answers_and_ends_on_a_signal(small: Path, name: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, str(small), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    url = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
    assert url.startswith("http://127.0.0.1:")
    async with aiohttp.ClientSession() as session:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        async with session.post(f"{url}/generate", json=body) as response:
            assert len((await response.json())["output_ids"]) == 3
    os.kill(process.pid, getattr(signal, name))
    _, said = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0, said.decode()
    assert said.decode().startswith(f"rolltape: serving {small}, weights default")


def test_off_loopback_it_wants_a_key(small: Path) -> None:
    for host in ("0.0.0.0", "::", "example.org"):
        with pytest.raises(UsageError, match="--api-key"):
            engine(model=small, host=host, api_key=None)


def test_logprobs_after_truncation_are_not_on_offer(small: Path) -> None:
    with pytest.raises(UsageError, match="--logprobs"):
        engine(model=small, logprobs=LogprobKind.AFTER_TRUNCATION)
