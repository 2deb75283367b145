"""A trainer's tensors → token records: what the loss saw, token by token. Only the exporter needs torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rolltape.tokens.losses import Dppo, Ipo, LossSpec, OnPolicyDistillation, PpoClip, loss_of
from rolltape.tokens.steps import Format, TokenStep, steps_of

if TYPE_CHECKING:
    from rolltape.tokens.exporter import TokenExporter
    from rolltape.tokens.reading import read_tokens, records_of
    from rolltape.tokens.report import ExportReport
    from rolltape.tokens.writing import scored, write_tokens

_HOMES = {
    "ExportReport": "rolltape.tokens.report",
    "TokenExporter": "rolltape.tokens.exporter",
    "read_tokens": "rolltape.tokens.reading",
    "records_of": "rolltape.tokens.reading",
    "scored": "rolltape.tokens.writing",
    "write_tokens": "rolltape.tokens.writing",
}

__all__ = [
    "Dppo",
    "ExportReport",
    "Format",
    "Ipo",
    "LossSpec",
    "OnPolicyDistillation",
    "PpoClip",
    "TokenExporter",
    "TokenStep",
    "loss_of",
    "read_tokens",
    "records_of",
    "scored",
    "steps_of",
    "write_tokens",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rolltape.tokens' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"rolltape.tokens.{name} needs torch; install rolltape[torch], or torch itself") from error
    globals()[name] = value
    return value
