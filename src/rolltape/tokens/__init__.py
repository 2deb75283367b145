"""Token records: what a trainer's loss saw, token by token. Only the exporter needs torch.

with TokenExporter("runs/exp1", rank=0, world_size=1, loss=PpoClip()) as exporter:
    exporter.export(step, micro_step, batch, outputs)
    exporter.mark_stable(step)
records = list(read_tokens("runs/exp1", step=12))
"""

from typing import TYPE_CHECKING

from rolltape.renamed import renamed
from rolltape.tokens.losses import CrossEntropy, Dppo, Ipo, LossSpec, OnPolicyDistillation, PpoClip, parse_loss
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
_RENAMED = {"loss_of": "parse_loss", "records_of": "read_step", "scored": "score_sample", "steps_of": "list_steps"}

__all__ = [
    "CrossEntropy",
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

__getattr__ = renamed(__name__, _RENAMED, lazy=_MODULES)
