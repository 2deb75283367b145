"""The conformance kit of engines: rules by which training gets exactly what was sampled, each as a check.

A check is a function from an `EngineProbe` to a `CheckResult`, or None if it does not apply to this engine. Checks use
only the engine protocol, so they work for every engine that implements it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable

from rolltape.doctor.engine import reply_checks, serving_checks
from rolltape.doctor.engine.probing import EngineProbe
from rolltape.doctor.results import CheckResult, Severity, fault, named
from rolltape.errors import EngineError, EngineUnreachable

EngineCheck = Callable[[EngineProbe], Awaitable[CheckResult | None]]


async def check_engine(
    probe: EngineProbe, checks: "dict[str, EngineCheck] | None" = None
) -> AsyncIterator[CheckResult]:
    """Run checks one by one. An engine that returns no reply, or only text, is not asked again."""
    for name, check in (ENGINE_CHECKS if checks is None else checks).items():
        result = await _run_check(name, check, probe)
        if result is not None:
            yield named(name, result)
        if name == "reachable" and (result is None or result.verdict is Severity.FAULT):
            probe.answers = False
        if not probe.answers:
            return


async def _run_check(name: str, check: EngineCheck, probe: EngineProbe) -> CheckResult | None:
    """The result of one check; an error of the engine in it is a fault."""
    advice = "read the engine's own log; see that it serves this model"
    try:
        return await check(probe)
    except TimeoutError:
        probe.answers = False
        failed = f"no answer in {probe.reply_timeout_s:g} s"
    except EngineError as error:
        # If not even a plain prompt gets a reply, every later check would report the same.
        probe.answers = name != "ids" and not isinstance(error, EngineUnreachable)
        failed = f"the engine failed: {error}"
    return fault(failed, advice if probe.answers else f"{advice}; the checks after this one were left out")


ENGINE_CHECKS: dict[str, EngineCheck] = {
    "reachable": serving_checks.check_reachable,
    "ids": reply_checks.check_ids,
    "logprobs": reply_checks.check_logprobs,
    "logprob kind": reply_checks.check_logprob_kind,
    "stop id": reply_checks.check_stop_id,
    "stop string": reply_checks.check_stop_string,
    "streaming": reply_checks.check_streaming,
    "abort": reply_checks.check_abort,
    "seed": reply_checks.check_seed,
    "weight version": serving_checks.check_weight_version,
    "prefix cache": serving_checks.check_prefix_cache,
    "constraints": serving_checks.check_constraints,
    "too long": serving_checks.check_too_long,
    "out of range": serving_checks.check_out_of_range,  # last, since it has crashed engines
}
