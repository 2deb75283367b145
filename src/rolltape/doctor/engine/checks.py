"""The conformance kit of engines: what one must do so that training sees what was sampled, each rule a check.

A check is a function from an `EngineProbe` to a `CheckResult`, or None where it does not apply to this engine. Checks
know engines by the engine protocol alone, so that they hold for every engine that implements it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable

from rolltape.doctor.engine import reply_checks, serving_checks
from rolltape.doctor.engine.probing import REPLY_TIMEOUT_S, EngineProbe
from rolltape.doctor.results import CheckResult, Severity, fault
from rolltape.errors import EngineError

EngineCheck = Callable[[EngineProbe], Awaitable[CheckResult | None]]


async def check_engine(
    probe: EngineProbe, checks: "dict[str, EngineCheck] | None" = None
) -> AsyncIterator[CheckResult]:
    """Run checks one by one. An engine that does not answer, or gives text alone, is asked nothing more."""
    for name, check in (ENGINE_CHECKS if checks is None else checks).items():
        result = await run_check(name, check, probe)
        if result is not None:
            yield result
        if name == "reachable" and (result is None or result.verdict is Severity.FAULT):
            return


async def run_check(name: str, check: EngineCheck, probe: EngineProbe) -> CheckResult | None:
    """The result of one check; an engine that fails in it has a fault."""
    try:
        return await check(probe)
    except EngineError as error:
        return fault(name, f"the engine failed: {error}", "read the engine's own log; see that it serves this model")
    except TimeoutError:
        return fault(name, f"no answer in {REPLY_TIMEOUT_S:g} s", "read the engine's own log")


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
    "out of range": serving_checks.check_out_of_range,  # last: engines without this check have died of it
}
