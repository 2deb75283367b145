"""Hold the engines of the gateway against real servers that run, by hand.

    python tests/engines/check_real_backends.py sglang:http://127.0.0.1:30000 vllm:http://127.0.0.1:8000

Each must serve the shipped model (or --model) in float32; the tiny engine scores the very ids that it gives.

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

import msgspec
import numpy as np
from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).parents[1]))

import rolltape
from engines.wanted import Told, generation
from rolltape.errors import EngineError
from rolltape.gateway.engines.opening import open_engine
from rolltape.gateway.engines.protocol import Engine, Generated
from rolltape.gateway.prompts import ChatPrompts
from rolltape.gateway.prompts.reply_form import Thinking
from rolltape.gateway.request import ChatRequest, OutputSchema, ToolChoice
from rolltape.gateway.turn.constraints import build_constraint
from rolltape.gateway.turn.generate import describe_generated
from rolltape.records.turn import Finish, LogprobKind
from rolltape.tiny import Sampling, TinyEngine, shipped_model
from tool_sessions import QUESTIONS, largest_difference, tool_session

TOLERANCE = 1e-3
ANSWER = {"type": "string", "enum": ["zebra", "quagga"]}
LOOK = {"type": "object", "properties": {"animal": ANSWER}, "required": ["animal"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": LOOK}}]
HELLO = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


class Checks:
    """Every check of one engine; `failed` counts those that did not hold."""

    def __init__(self, engine: Engine, own: TinyEngine, folder: Path) -> None:
        assert own.texts is not None
        self.engine, self.own, self.texts = engine, own, own.texts
        self.failed = 0
        self.form = ChatPrompts(folder).reply_form
        self.end = own.config.eos_ids
        self.hello = self.texts.encode(HELLO)
        self.noise: list[int] = np.random.default_rng(0).integers(10, 2000, 60).tolist()

    def holds(self, what: str, fact: bool, detail: object = "") -> None:
        self.failed += not fact
        print(f"  {'ok  ' if fact else 'FAIL'} {what} {detail}")

    async def run(self) -> None:
        print(f"{self.engine.name}: {await self.engine.facts()}")
        await self.stop_id()
        await self.logprobs()
        await self.stop_string()
        await self.next_turn()
        await self.seeds()
        await self.constraints()
        await self.abort()
        await self.cancel()
        if self.engine.streams:
            await self.streaming()
            await self.abort_of_stream()

    async def stop_id(self) -> None:
        wanted = generation(self.hello, stop_ids=self.end)
        given = await self.engine.generate(wanted)
        self.holds("says what it gives:", True, describe_generated(self.engine, wanted, given))
        self.holds("ends on a stop id, which stays", given.finish is Finish.STOP and given.ids[-1] in self.end)

    async def logprobs(self) -> None:
        for temperature in (1.0, 0.5):
            given = await self.engine.generate(
                generation(self.noise, name=f"l{temperature}", temperature=temperature, max_tokens=100)
            )
            raw = await self.raw(self.noise, given)
            assert given.logprobs is not None
            worst = float(np.nanmax(np.abs(raw - given.logprobs)))
            missing = int(np.isnan(given.logprobs).sum())
            as_raw = temperature == 1.0 or given.logprob_kind is LogprobKind.RAW
            self.holds(
                f"at temperature {temperature} its logprobs are{'' if as_raw else ' not'} the raw ones",
                (worst < TOLERANCE) == as_raw,
                f"(largest difference {worst:.1e} over {len(given.ids)} ids, {missing} missing)",
            )

    async def raw(self, prompt: list[int], given: Generated) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        scoring = Sampling(max_tokens=0, prompt_logprobs_from=len(prompt))
        scored = await self.own.generate([*prompt, *given.ids.tolist()], scoring)
        return np.array(scored.prompt_logprobs, dtype=np.float64)

    async def stop_string(self) -> None:
        given = await self.engine.generate(generation(self.hello, name="s", temperature=0.0, stop=("greet",)))
        text = self.texts.decode(given.ids.tolist())
        self.holds("names the stop string", (given.finish, given.stop_string) == (Finish.STOP_STRING, "greet"))
        self.holds("keeps the ids of the stop string", "greet" in text, repr(text))

    async def next_turn(self) -> None:
        first = await self.engine.generate(generation(self.hello, name="t1", stop_ids=self.end))
        prompt = [*self.hello, *first.ids.tolist(), *self.texts.encode("\n" + HELLO)]
        second = await self.engine.generate(generation(prompt, name="t2", stop_ids=self.end))
        self.holds("goes on from its own ids", second.finish is Finish.STOP, f"(cached {second.cached_tokens})")

    async def seeds(self) -> None:
        if "seed" in self.engine.applies:
            one, two = [
                await self.engine.generate(generation(self.noise, name=name, seed=5, temperature=1.5))
                for name in ("x", "y")
            ]
            self.holds("gives the same for the same seed", one.ids.tolist() == two.ids.tolist())

    async def constraints(self) -> None:
        asks: dict[str, dict[str, Any]] = {
            "a schema": {"output_schema": OutputSchema("response_format", ANSWER)},
            "a call": {"tools": TOOLS, "tool_choice": ToolChoice("required", "look")},
        }
        for thinking in (Thinking.OFF, Thinking.POSSIBLE):
            for what, fields in asks.items():
                ask = ChatRequest(api="chat", model="it", messages=[], **fields)
                abilities = self.engine.abilities
                constraint, ignored = build_constraint(ask, self.form, thinking, "forced", abilities)
                if constraint is None:
                    print(f"  --   {ignored[0]}")
                    continue
                wanted = generation(self.hello, name=f"k{what[2:]}{thinking}", stop_ids=self.end)
                given = await self.engine.generate(msgspec.structs.replace(wanted, constraint=constraint))
                text = self.texts.decode(given.ids.tolist())
                start = '<tool_call>\n{"name": "look", "arguments": {' if "tools" in fields else '"'
                answer = text.split("</think>")[-1].lstrip()
                cut = given.finish is Finish.LENGTH and "</think>" not in text and text.startswith("<think>")
                self.holds(f"is held to {what}, thinking {thinking}", cut or answer.startswith(start), repr(text))

    async def abort(self) -> None:
        wanted = generation(self.noise, name="a", temperature=2.0, max_tokens=1500)
        task = asyncio.create_task(self.engine.generate(wanted))
        await asyncio.sleep(1.0)
        await self.engine.abort("a")
        async with asyncio.timeout(20):
            given = await task
        self.holds("ends when it is aborted", given.finish is Finish.ABORT, f"(with {len(given.ids)} ids)")
        if given.logprobs is not None:
            worst = float(np.nanmax(np.abs(await self.raw(self.noise, given) - given.logprobs), initial=0))
            as_raw = given.logprob_kind is LogprobKind.RAW
            self.holds("gives the logprobs of what there was", not as_raw or worst < TOLERANCE, f"({worst:.1e})")

    async def streaming(self) -> None:
        settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 100}
        plain = await self.engine.generate(generation(self.noise, name="w1", **settings))
        told = Told()
        streamed = await self.engine.generate(generation(self.noise, name="w2", on_sampled=told, **settings))
        sizes = [len(chunk) for chunk in told.chunks]
        self.holds("tells what it gives, while it samples", told.ids == streamed.ids.tolist(), f"(chunks of {sizes})")
        self.holds("tells it in parts", len(told.chunks) > 1)
        self.holds("gives the same streamed", streamed.ids.tolist() == plain.ids.tolist())
        same = [(one.first_version, one.last_version) for one in (plain, streamed)]
        self.holds("says the same versions streamed", same[0] == same[1], same)
        assert streamed.logprobs is not None
        worst = float(np.nanmax(np.abs(await self.raw(self.noise, streamed) - streamed.logprobs)))
        as_raw = streamed.logprob_kind is LogprobKind.RAW
        self.holds("gives the logprobs of what it streamed", not as_raw or worst < TOLERANCE, f"({worst:.1e})")

    async def abort_of_stream(self) -> None:
        first = asyncio.Event()
        told = Told(first.set)
        wanted = generation(self.noise, name="v", temperature=2.0, max_tokens=1500, on_sampled=told)
        task = asyncio.create_task(self.engine.generate(wanted))
        async with asyncio.timeout(20):
            await first.wait()
            await self.engine.abort("v")
            given = await task
        self.holds("ends a stream when it is aborted", given.finish is Finish.ABORT, f"(with {len(given.ids)} ids)")
        self.holds("gives what it told before", given.ids.tolist() == told.ids)

    async def cancel(self) -> None:
        task = asyncio.create_task(self.engine.generate(generation(self.noise, name="c", max_tokens=1500)))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.wait({task})
        self.holds("can be cancelled", task.cancelled())
        try:
            given = await self.engine.generate(generation([5] * 40_000, name="d"))
            self.holds("refuses what is too long", False, given)
        except EngineError as error:
            self.holds("refuses what is too long:", True, str(error)[:150])
        async with asyncio.timeout(20):
            await self.engine.generate(generation(self.hello, name="e", max_tokens=1))


async def checked(specs: list[str], folder: Path) -> int:
    failed = 0
    async with TinyEngine(folder) as own:
        for spec in specs:
            engine = open_engine(spec)
            checks = Checks(engine, own, folder)
            await checks.run()
            await engine.close()
            await through_gateway(spec, folder, checks)
            failed += checks.failed
    return failed


async def through_gateway(spec: str, folder: Path, checks: Checks) -> None:
    """The same of what is recorded: a multi-turn tool session through the gateway."""
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        async with rolltape.Gateway(engine=spec, model=folder, tape=run) as gateway:
            for question in QUESTIONS:
                await tool_session(gateway, question, 1.0)
            bridged = gateway.status()["counts"].get("bridged", 0)
        worst, compared = await largest_difference(run, checks.own, 1.0)
    detail = f"(largest difference {worst:.1e} over {compared} ids, {bridged} prompts bridged)"
    checks.holds("gives the same through the gateway", worst < TOLERANCE and compared > 100, detail)


async def weights_change(spec: str, served: Path, other: Path) -> int:
    """Hand over weights while a reply is being sampled; how many checks failed."""
    async with TinyEngine(served) as before, TinyEngine(other) as after:
        checks = Checks(open_engine(spec), before, shipped_model())
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
        await checks.engine.close()
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
