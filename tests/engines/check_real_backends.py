"""Hold the engines of the gateway against real servers that run, by hand.

    python tests/engines/check_real_backends.py sglang:http://127.0.0.1:30000 vllm:http://127.0.0.1:8000

Each must serve the shipped model (or --model) in float32. The checks are those of `rolltape doctor`, and exact.

    python tests/engines/check_real_backends.py sglang:URL --model SERVED --weights OTHER

hands the weights of OTHER to the server in the middle of a reply instead, and takes them back. Both must be checkpoints
that rarely end a reply: `python tests/tiny/checkpoints.py FOLDER SEED` writes such, of random weights.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).parents[1]))

import rolltape
from rolltape.doctor import Severity, Stack, diagnose
from rolltape.tiny import Sampling, TinyEngine, shipped_model
from tool_sessions import QUESTIONS, largest_difference, tool_session

TOLERANCE = 1e-3


class Checks:
    """What must hold; `failed` counts what did not."""

    def __init__(self) -> None:
        self.failed = 0

    def holds(self, what: str, fact: bool, detail: object = "") -> None:
        self.failed += not fact
        print(f"  {'ok  ' if fact else 'FAIL'} {what} {detail}")


async def checked(specs: list[str], folder: Path) -> int:
    """Every check of `rolltape doctor`, and the same logprobs where a gateway recorded them; how many failed."""
    checks = Checks()
    for spec in specs:
        print(spec)
        async for result in diagnose(Stack(engine=spec, model=folder)):
            fine = result.verdict in (Severity.OK, Severity.NOTE)
            exact = result.check != "weights" or result.figures.get("largest", np.inf) < TOLERANCE
            checks.holds(result.check, fine and exact, result.measured)
        await through_gateway(spec, folder, checks)
    return checks.failed


async def through_gateway(spec: str, folder: Path, checks: Checks) -> None:
    """The same of what is recorded: a multi-turn tool session through the gateway."""
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        async with rolltape.Gateway(engine=spec, model=folder, tape=run) as gateway:
            for question in QUESTIONS:
                await tool_session(gateway, question, 1.0)
            bridged = gateway.status()["counts"].get("bridged", 0)
        async with TinyEngine(folder) as own:
            worst, compared = await largest_difference(run, own, 1.0)
    detail = f"(largest difference {worst:.1e} over {compared} ids, {bridged} prompts bridged)"
    checks.holds("gives the same through the gateway", worst < TOLERANCE and compared > 100, detail)


async def weights_change(spec: str, served: Path, other: Path) -> int:
    """Hand over weights while a reply is being sampled; how many checks failed."""
    async with TinyEngine(served) as before, TinyEngine(other) as after:
        checks = Checks()
        with tempfile.TemporaryDirectory() as place:
            run = Path(place) / "run"
            async with rolltape.Gateway(engine=spec, model=shipped_model(), tape=run) as gateway:
                await gateway.update_weights(served, "v0")
                session = await gateway.open_session(task_id="weights")
                client = AsyncOpenAI(base_url=session.openai_base_url, api_key=session.key)
                for _ in range(2):  # the second time under the new weights alone: nothing of the old ones is used
                    messages: Any = [{"role": "user", "content": "Tell me of " + "zebras and " * 100}]
                    ask = client.chat.completions.create
                    stream = await ask(model="it", messages=messages, stream=True, temperature=1.0, max_tokens=200)
                    async for chunk in stream:
                        told = chunk.choices[0].delta.model_dump(exclude={"role"}) if chunk.choices else {}
                        if any(told.values()) and gateway.status()["version"] == "v0":
                            began = time.monotonic()
                            interrupted = await gateway.update_weights(other, "v1")
                            took = f"(in {time.monotonic() - began:.2f} s)"
                            checks.holds("takes weights in the middle of a reply", interrupted == 1, took)
                await client.close()
                await session.finish(samples=False)
                await gateway.update_weights(served, "v0")
            for turn in (turn for rollout in rolltape.read(run).rollouts() for turn in rollout.turns):
                for segment in turn.facts.segments:
                    assert turn.logprobs is not None
                    ids = [*turn.prompt_ids.tolist(), *turn.sampled_ids.tolist()]
                    start, stop = (len(turn.prompt_ids) + place for place in (segment.start, segment.stop))
                    scoring = Sampling(max_tokens=0, prompt_logprobs_from=start)
                    scorer = before if segment.first_version == "v0" else after
                    scored = await scorer.generate(ids[:stop], scoring)
                    differences = np.array(scored.prompt_logprobs, float) - turn.logprobs[segment.start : segment.stop]
                    worst = float(np.nanmax(np.abs(differences)))
                    what = f"{stop - start} ids of {segment.first_version} have its logprobs"
                    checks.holds(what, worst < TOLERANCE, f"(largest difference {worst:.1e})")
                versions = [segment.first_version for segment in turn.facts.segments]
                checks.holds("says under which weights", versions in (["v0", "v1"], ["v1"]), versions)
    return checks.failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("engines", nargs="+", help="as for `rolltape serve`: KIND:URL")
    parser.add_argument("--model", type=Path, default=None, help="what they serve; by default the shipped model")
    parser.add_argument("--weights", type=Path, default=None, help="a checkpoint to hand over, of the same shape")
    asked = parser.parse_args()
    if asked.weights is not None:
        return sum(asyncio.run(weights_change(spec, asked.model, asked.weights)) for spec in asked.engines)
    return int(asyncio.run(checked(asked.engines, asked.model or shipped_model())) > 0)


if __name__ == "__main__":
    sys.exit(main())
