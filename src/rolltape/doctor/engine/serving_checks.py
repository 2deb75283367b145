"""Checks of an engine as a server: its facts, its prefix cache, its constraints, and its refusals."""

import time

import msgspec

from rolltape.doctor.engine.probing import EngineProbe
from rolltape.doctor.results import CheckResult, fault, note, ok, warning
from rolltape.errors import EngineError, EngineUnreachable
from rolltape.gateway.engines.protocol import Generated
from rolltape.gateway.prompts.reply_form import Thinking
from rolltape.gateway.request import ChatRequest, OutputSchema
from rolltape.gateway.turn.constraints import build_constraint

_LONG_PROMPT = 512  # ids: many blocks of every engine's prefix cache
_LONGEST_REFUSAL = 300_000  # ids: no longer prompt is sent only to test its refusal
_ANSWERS = ("zebra", "quagga")


async def check_reachable(probe: EngineProbe) -> CheckResult:
    try:
        facts = await probe.engine.facts()
    except EngineUnreachable as error:
        return fault(str(error), "start the engine, or correct --engine")
    parts = [facts.model or "a model without a name"]
    if facts.context is not None:
        parts.append(f"context {facts.context:,}")
    if not probe.engine.token_faithful:
        return fault(
            f"{', '.join(parts)}: it takes messages and returns text, without ids and logprobs",
            "its replies cannot be trained; serve the model with SGLang, vLLM or llama.cpp",
        )
    return ok(", ".join(parts), model=facts.model, context=facts.context)


async def check_weight_version(probe: EngineProbe) -> CheckResult:
    given = await probe.sample(probe.noise(8), temperature=1.0, max_tokens=1)
    version = given.last_version or (await probe.engine.facts()).version
    if version is None:
        return note(
            "neither replies nor the engine name one",
            "announce versions to the gateway when you change weights; otherwise staleness is unknown",
        )
    where = "in each reply" if given.last_version is not None else "by the engine, not in replies"
    return ok(f"{version!r}, {where}", version=version)


async def check_prefix_cache(probe: EngineProbe) -> CheckResult:
    """Whether only the new part is computed of a prompt that continues an earlier one."""
    prompt = probe.noise(min(_LONG_PROMPT, await _half_context(probe)), unseen=True)
    cold_s, _ = await _timed(probe, prompt)
    warm_s, given = await _timed(probe, [*prompt, *probe.noise(8)])
    times = f"{cold_s * 1000:.0f} ms, then {warm_s * 1000:.0f} ms"
    if given.cached_tokens is None:
        return note(
            f"the engine does not report it; a prompt of {len(prompt)} ids took {times} when it came again",
            "vLLM: --enable-prompt-tokens-details",
        )
    if given.cached_tokens < len(prompt) // 2:
        return warning(
            f"{given.cached_tokens} of {len(prompt)} ids that came again were cached ({times})",
            "turn the prefix cache on (SGLang: no --disable-radix-cache; vLLM: --enable-prefix-caching): every turn of "
            "an agent computes its whole history again",
            cached_tokens=given.cached_tokens,
        )
    return ok(
        f"{given.cached_tokens} of {len(prompt)} ids that came again were cached ({times})",
        cached_tokens=given.cached_tokens,
    )


async def _timed(probe: EngineProbe, prompt: list[int]) -> tuple[float, Generated]:
    began = time.perf_counter()
    given = await probe.sample(prompt, temperature=1.0, max_tokens=1)
    return time.perf_counter() - began, given


async def _half_context(probe: EngineProbe) -> int:
    context = (await probe.engine.facts()).context
    return _LONG_PROMPT if context is None else max(context // 2, 16)


async def check_constraints(probe: EngineProbe) -> CheckResult | None:
    if probe.prompts is None:
        return None
    schema = {"type": "string", "enum": list(_ANSWERS)}
    ask = ChatRequest(api="chat", model="it", messages=[], output_schema=OutputSchema("response_format", schema))
    constraint, _ = build_constraint(ask, probe.prompts.reply_form, Thinking.OFF, "forced", probe.engine.abilities)
    if constraint is None:
        return note(
            "the engine cannot hold a reply to a JSON schema",
            "replies are sampled freely; turns list the schema as not applied",
        )
    wanted = probe.wanted(probe.noise(16), temperature=1.0, stop_ids=probe.stop_ids)
    try:
        given = await probe.generate(msgspec.structs.replace(wanted, constraint=constraint))
    except EngineError as error:
        return warning(f"refused: {error}", "pass --constrain none, or fix the engine's grammar backend")
    text = probe.prompts.decode_reply(given.ids, (), None).strip()
    if any(f'"{one}"' == text for one in _ANSWERS):
        return ok(f"a reply is held to a JSON schema ({text})")
    return warning(f"a reply was not held to its JSON schema: {text[:60]!r}", "pass --constrain none")


async def check_too_long(probe: EngineProbe) -> CheckResult | None:
    context = (await probe.engine.facts()).context
    if context is None or context > _LONGEST_REFUSAL:
        return None
    prompt = probe.noise(context + 64)
    try:
        given = await probe.sample(prompt, max_tokens=1)
    except EngineError as error:
        await probe.sample(prompt[:8], max_tokens=1)
        return ok(f"a prompt of {len(prompt):,} ids is refused ({getattr(error, 'status', None) or 'error'})")
    return fault(
        f"a prompt of {len(prompt):,} ids, over the context of {context:,}, got a reply of {len(given.ids)} ids",
        "the engine cuts prompts silently, so replies are not conditioned on what is recorded; have it refuse them",
    )


async def check_out_of_range(probe: EngineProbe) -> CheckResult:
    outside = 2**31 - 1
    try:
        await probe.sample([*probe.noise(8), outside], max_tokens=1)
    except EngineError as error:
        status = getattr(error, "status", None)
        await probe.sample(probe.noise(8), max_tokens=1)  # check that it has not crashed
        if status is None or status < 500:
            return ok(f"id {outside} is refused ({status or 'error'})")
        return note(f"id {outside} is answered with {status}", "a client's mistake looks like a fault of the engine")
    return warning(
        f"id {outside}, outside every vocabulary, got a reply", "a prompt of another model's ids would not be noticed"
    )
