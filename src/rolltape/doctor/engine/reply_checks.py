"""Checks of a reply's data: ids, logprobs, the stop id, and the kept part of an interrupted reply."""

import asyncio

import numpy as np

from rolltape.doctor.engine.logprob_kinds import PLACES, TEMPERATURE, TOP_K, measure_kind
from rolltape.doctor.engine.probing import EngineProbe, SampledChunks
from rolltape.doctor.results import CheckResult, fault, note, ok, warning, words
from rolltape.errors import EngineError
from rolltape.gateway.engines.protocol import Generated
from rolltape.records.turn import Finish, LogprobKind
from rolltape.records.wording import plural


async def check_ids(probe: EngineProbe) -> CheckResult:
    """Whether the engine continues the ids of the prompt, and returns ids.

    Two splits of one text are different prompts. An engine that decodes a prompt and tokenizes it again cannot
    distinguish them.
    """
    replies = [await probe.sample(probe.noise(32), temperature=1.0, max_tokens=16) for _ in range(3)]
    count = sum(len(one.ids) for one in replies)
    if not count:
        return fault("three prompts of ids got replies without ids", "see that the engine returns token ids")
    measured = f"{plural(count, 'sampled id')} for three prompts of 32"
    if probe.prompts is None:
        return ok(measured)
    words = " the quick brown fox jumps over the lazy dog and the quick brown fox" * 2
    usual = probe.prompts.encode(words, add_special_tokens=False).tolist()
    letters = [token for one in words for token in probe.prompts.encode(one, add_special_tokens=False).tolist()]
    if usual == letters:
        return ok(measured)
    replies = [await probe.sample(prompt, temperature=0.0, max_tokens=4) for prompt in (usual, letters)]
    if all(one.logprobs is not None for one in replies) and _same_reply(*replies):
        return fault(
            f"a text in {len(usual)} ids and the same text in {len(letters)} ids get the same reply and logprobs",
            "the engine tokenizes prompts again; send ids on a route that keeps them",
        )
    return ok(f"{measured}; two splits of one text get different results")


def _same_reply(one: Generated, other: Generated) -> bool:
    if one.ids.tolist() != other.ids.tolist() or one.logprobs is None or other.logprobs is None:
        return False
    return bool(np.allclose(one.logprobs, other.logprobs, atol=1e-7, rtol=0, equal_nan=True))


async def check_logprobs(probe: EngineProbe) -> CheckResult:
    replies = [await probe.sample(probe.noise(32), temperature=1.0, max_tokens=32) for _ in range(3)]
    given = [one.logprobs for one in replies if one.logprobs is not None]
    if len(given) < len(replies):
        return fault("replies have no logprobs", "have the engine return the logprob of each sampled id")
    values = np.concatenate(given)
    missing = int(np.isnan(values).sum())
    if missing:
        return warning(
            f"{missing} of {len(values)} sampled ids have no logprob",
            "those ids do not train under a policy that needs logprobs; SGLang and vLLM give all",
            missing=missing,
        )
    return ok(f"one for each of {len(values)} sampled ids, none above zero")


async def check_logprob_kind(probe: EngineProbe) -> CheckResult:
    declared = (await probe.sample(probe.noise(8), temperature=1.0, max_tokens=1)).logprob_kind
    found = await measure_kind(probe)
    figures = {
        "declared": declared,
        "measured": found.kind,
        "places": found.places,
        "distances": {kind.value: round(value, 5) for kind, value in found.distances.items()},
    }
    claim = "no kind is declared" if declared is None else f"declared {words(declared)}"
    how = f"over {found.places} places at temperature {TEMPERATURE:g}, top-k {TOP_K}"
    if found.kind is None and not found.distances:
        return note(
            f"{claim}; only {plural(found.places, 'place')} could distinguish the kinds, and {PLACES} are needed",
            "run it again on a checkpoint that is less certain of its next token",
            **figures,
        )
    nearest = min(found.distances.values())
    if found.kind is None and len(found.distances) == 1 and declared is not LogprobKind.RAW:
        return note(
            f"{claim}; they are not raw ({how}), and the kind is unclear without lists of the most likely ids",
            **figures,
        )
    if found.kind is None:
        return fault(
            f"{claim}; measured none of raw, after temperature, after truncation ({nearest:.2f} off, {how})",
            "see which logprobs the engine returns, and that it applies the sampling parameters",
            **figures,
        )
    if found.kind is not declared:
        return fault(
            f"{claim}, measured {words(found.kind)} ({how})",
            f"pass --logprobs {found.kind} to serve and collect, or change the engine's own setting",
            **figures,
        )
    return ok(f"{words(found.kind)}, as declared ({how}, {nearest:.4f} off)", **figures)


async def check_stop_id(probe: EngineProbe) -> CheckResult:
    """Whether a reply includes its stop id. Any id can be a stop id, so one is chosen that will be sampled."""
    for _ in range(3):
        prompt = probe.noise(32)
        whole = (await probe.sample(prompt, temperature=0.0, max_tokens=24)).ids.tolist()
        if not whole:
            continue
        # An id that ends the reply late, if it does not also occur earlier.
        stop = next((one for one in reversed(whole[:16]) if whole.index(one) >= 2), whole[0])
        given = await probe.sample(prompt, temperature=0.0, max_tokens=24, stop_ids=(stop,))
        if given.finish is not Finish.STOP:
            continue  # arithmetic that depends on the batch can change even a greedy reply
        if len(given.ids) and int(given.ids[-1]) == stop:
            return ok(f"the id that ended a reply of {plural(len(given.ids), 'id')} is its last")
        return fault(
            f"a reply ended on stop id {stop}, and its {len(given.ids)} ids do not have it",
            "have the engine keep the stop id (SGLang: no_stop_trim; vLLM: include_stop_str_in_output); without it "
            "no model learns to end its turn",
        )
    return warning(
        "three greedy replies did not end at the stop id that they were given",
        "see that the engine honors stop_token_ids",
    )


async def check_stop_string(probe: EngineProbe) -> CheckResult | None:
    if probe.prompts is None or "stop" not in probe.engine.applies:
        return None
    for _ in range(3):
        prompt = probe.noise(32)
        whole = await probe.sample(prompt, temperature=0.0, max_tokens=24)
        words = [word for word in probe.prompts.decode(whole.ids).split() if len(word) > 1 and word.isalnum()]
        if not words:
            continue
        try:
            given = await probe.sample(prompt, temperature=0.0, max_tokens=24, stop=(words[-1],))
        except EngineError as error:
            return warning(f"refused: {error}", "agents that use stop strings will fail")
        if given.finish is not Finish.STOP_STRING:
            continue
        if given.stop_string == words[-1] and words[-1] in probe.prompts.decode(given.ids):
            return ok(f"named, and its ids stay in the reply ({words[-1]!r})")
        return warning(
            f"a reply ended at {words[-1]!r}, and its ids do not include that text",
            "the ids before a stop string are trained, and those of the string are lost",
        )
    return note("no reply reached its stop string")


async def check_streaming(probe: EngineProbe) -> CheckResult:
    if not probe.engine.streams:
        return note("ids arrive only when a reply has ended", "agents wait for whole replies; nothing is lost")
    streamed = SampledChunks()
    given = await probe.sample(probe.noise(32), temperature=1.0, max_tokens=96, on_sampled=streamed)
    if streamed.ids != given.ids.tolist():
        return fault(
            f"{len(streamed.ids)} ids were streamed, and the reply has {len(given.ids)}; they differ",
            "do not stream from this engine",
        )
    if len(streamed.chunks) < 2 < len(given.ids):
        return note(f"{len(given.ids)} ids came in one piece", "a proxy before the engine may hold it back")
    return ok(f"{len(given.ids)} ids in {len(streamed.chunks)} pieces, the same as in the whole reply")


async def check_abort(probe: EngineProbe) -> CheckResult:
    """Whether the sampled part of an interrupted reply is kept, as needed when weights change."""
    first = asyncio.Event()
    streamed = SampledChunks(first.set)
    streams = probe.engine.streams
    wanted = probe.wanted(probe.noise(32), temperature=1.5, max_tokens=1000, on_sampled=streamed if streams else None)
    async with asyncio.timeout(probe.reply_timeout_s):
        task = asyncio.create_task(probe.engine.generate(wanted))
        if streams:
            ended = asyncio.create_task(first.wait())
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
        else:
            await asyncio.sleep(0.5)
        await probe.engine.abort(wanted.id)
        given = await task
    await _cancel_one(probe)
    if given.finish is not Finish.ABORT:
        return note(f"a reply of {len(given.ids)} ids ended before it could be interrupted")
    if len(given.ids) and given.logprobs is not None and given.ids.tolist()[: len(streamed.ids)] == streamed.ids:
        return ok(f"an interrupted reply keeps its {plural(len(given.ids), 'id')}, with logprobs")
    return note(
        "an interrupted reply is lost",
        "after a change of weights, replies start over, and their tokens are sampled again",
    )


async def _cancel_one(probe: EngineProbe) -> None:
    """Cancel a request, like a client that hangs up; the engine must continue with others."""
    task = asyncio.create_task(probe.engine.generate(probe.wanted(probe.noise(32), temperature=1.0, max_tokens=1000)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    await probe.sample(probe.noise(8), max_tokens=1)


async def check_seed(probe: EngineProbe) -> CheckResult:
    if "seed" not in probe.engine.applies:
        return note("the engine does not apply a request's seed", "SGLang: --enable-deterministic-inference")
    prompt = probe.noise(32)
    one, two = [(await probe.sample(prompt, temperature=1.0, seed=5, max_tokens=24)).ids.tolist() for _ in range(2)]
    if one == two:
        return ok(f"the same seed gave the same {len(one)} ids twice")
    return note("the same seed gave two different replies", "rollouts cannot be repeated exactly")
