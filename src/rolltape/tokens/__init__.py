"""Token records: what a trainer's loss saw, token by token. Only the exporter needs torch.

with TokenExporter("runs/exp1", rank=0, world_size=1, loss=PpoClip()) as exporter:
    exporter.export(step, micro_step, batch, outputs)
    exporter.mark_stable(step)
records = list(read_tokens("runs/exp1", step=12))
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rolltape.tokens.losses import Dppo, Ipo, LossSpec, OnPolicyDistillation, PpoClip, parse_loss
from rolltape.tokens.steps import Format, TokenStep, list_steps

if TYPE_CHECKING:
    from rolltape.records.token_record import TokenRecord
    from rolltape.tokens.exporter import TokenExporter
    from rolltape.tokens.files import read_step, read_tokens, score_sample, write_tokens
    from rolltape.tokens.report import ExportReport

_MODULES = {
    "rolltape.records.token_record": "TokenRecord",
    "rolltape.tokens.exporter": "TokenExporter",
    "rolltape.tokens.files": "read_step read_tokens score_sample write_tokens",
    "rolltape.tokens.report": "ExportReport",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
# Names of 0.1, which go with 0.3.
_RENAMED = {"loss_of": "parse_loss", "records_of": "read_step", "scored": "score_sample", "steps_of": "list_steps"}

__all__ = [
    "Dppo",
    "ExportReport",
    "Format",
    "Ipo",
    "LossSpec",
    "OnPolicyDistillation",
    "PpoClip",
    "TokenExporter",
    "TokenRecord",
    "TokenStep",
    "list_steps",
    "parse_loss",
    "read_step",
    "read_tokens",
    "score_sample",
    "write_tokens",
]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"rolltape.tokens.{name} is now {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return globals().get(_RENAMED[name]) or __getattr__(_RENAMED[name])
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
