"""The process that collects: a gateway before the tiny engine, and one step after the other, ahead of the trainer.

It ends when its standard input does, so that it never outlives the trainer that started it.
"""

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import NamedTuple

import msgspec

import rolltape
from examples.train_tiny.tasks import make_tasks
from rolltape.collect.collector import Collector
from rolltape.collect.settings import CollectSettings
from rolltape.errors import CollectError
from rolltape.gateway.admin_key import find_gateway
from rolltape.gateway.engines.inprocess import InProcessEngine
from rolltape.gateway.gateway import Gateway
from rolltape.gateway.request import SamplingParams
from rolltape.gateway.settings import GatewaySettings
from rolltape.tiny import TinyEngine, shipped_model

_REPOSITORY = Path(__file__).parents[2]  # where the examples are imported from


class Collecting(NamedTuple):
    """What is collected, and how far ahead."""

    seed: int = 0
    steps: int = 14
    tasks: int = 8  # of each step
    group_size: int = 8
    temperature: float = 0.7
    max_ahead: int = 16  # groups that have begun, and that the trainer is not done with
    max_concurrent: int = 32


@contextmanager
def collector(run: Path, collecting: Collecting) -> Iterator[None]:
    """The collector in a process of its own, within the block; its gateway listens."""
    command = [sys.executable, "-m", __name__, "--run", str(run.absolute()), msgspec.json.encode(collecting).decode()]
    with Popen(command, stdin=PIPE, cwd=_REPOSITORY) as process:
        try:
            while find_gateway(str(run)) is None:
                if process.poll() is not None:
                    raise CollectError(f"run {run}: the collector ended with {process.returncode} before it listened")
                time.sleep(0.1)
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()


async def collect(run: Path, collecting: Collecting) -> None:
    """Collect all steps. The gateway stays afterwards, for weights that are still handed over."""
    settings = CollectSettings(
        source="tasks",
        group_size=collecting.group_size,
        sampling=SamplingParams(temperature=collecting.temperature, max_tokens=96),
        thinking=True,
        max_turns=12,
        max_concurrent=collecting.max_concurrent,
    )
    engine = InProcessEngine(TinyEngine(shipped_model(), version="0"), model="tiny")
    with rolltape.open(run) as tape:
        limit = rolltape.RunAheadLimit(tape, max_groups=collecting.max_ahead)
        # With its key in the run, the trainer finds this gateway.
        async with Gateway(
            engine=engine, tape=tape, model=shipped_model(), settings=GatewaySettings(keep_admin_key=True)
        ) as gateway:
            for step in range(collecting.steps):
                one = Collector(
                    msgspec.structs.replace(settings, step=step), tape, gateway=gateway, run_ahead=limit, is_open=True
                )
                async with asyncio.TaskGroup() as running:
                    running.create_task(one.run())
                    tasks = make_tasks(collecting.seed, step, collecting.tasks)
                    await asyncio.gather(*map(one.attempt, tasks))
                    one.close()
            await asyncio.Event().wait()


async def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("collecting", help="the fields of `Collecting`, as JSON")
    told = parser.parse_args(arguments)
    logging.getLogger("rolltape").setLevel(logging.ERROR)
    collecting = asyncio.ensure_future(collect(told.run, msgspec.json.decode(told.collecting, type=Collecting)))
    trainer_is_gone = asyncio.ensure_future(_until_stdin_ends())
    await asyncio.wait({collecting, trainer_is_gone}, return_when=asyncio.FIRST_COMPLETED)
    if collecting.done():
        collecting.result()
    collecting.cancel()
    await asyncio.wait({collecting})


async def _until_stdin_ends() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


if __name__ == "__main__":
    asyncio.run(main())
