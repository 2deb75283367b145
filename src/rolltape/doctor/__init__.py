"""Diagnose a stack, "does it train what it sampled?", and the conformance kit that does it.

`rolltape doctor` prints the results of `diagnose`. The lists of checks are the kit: `check_engine` tests an engine by
`ENGINE_CHECKS`, and `check_gateway` tests a gateway by `GATEWAY_CHECKS`.
docs/how-to/doctor.md has every check.
"""

from rolltape.doctor.diagnose import Stack, diagnose
from rolltape.doctor.engine.checks import ENGINE_CHECKS, check_engine
from rolltape.doctor.engine.probing import EngineProbe
from rolltape.doctor.gateway.checks import GATEWAY_CHECKS, check_gateway
from rolltape.doctor.model_checks import MODEL_CHECKS, ModelProbe, check_model
from rolltape.doctor.results import CheckResult, Severity

__all__ = [
    "ENGINE_CHECKS",
    "GATEWAY_CHECKS",
    "MODEL_CHECKS",
    "CheckResult",
    "EngineProbe",
    "ModelProbe",
    "Severity",
    "Stack",
    "check_engine",
    "check_gateway",
    "check_model",
    "diagnose",
]
