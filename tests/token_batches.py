"""Micro-batches as trainers hand them over, and what the exporter makes of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolltape.records.token_record import TokenRecord
from rolltape.tokens import Format, LossSpec, TokenExporter, read_tokens

Batch = dict[str, Any]
Columns = Mapping[str, Tensor]

PAD = {"ids": 0, "trained_mask": 0}


def sequence_columns(length: int, seed: int = 0, trained: Sequence[bool] | None = None) -> dict[str, Tensor]:
    """Every column that a trainer can give, for one sequence."""
    random = torch.Generator().manual_seed(seed)
    inference = -torch.rand(length, generator=random) * 3
    columns = {
        "ids": torch.randint(0, 1000, (length,), generator=random),
        "position_ids": torch.arange(length),
        "trained_mask": torch.rand(length, generator=random) < 0.7 if trained is None else torch.tensor(trained),
        "advantages": torch.randn(length, generator=random),
        "rewards": torch.randn(length, generator=random),
        "inference_logprobs": inference,
        "old_logprobs": inference + torch.randn(length, generator=random) * 0.01,
        "reference_logprobs": inference + torch.randn(length, generator=random) * 0.3,
        "rl_weights": torch.rand(length, generator=random),
        "ce_weights": torch.rand(length, generator=random),
        "ref_kl_weights": torch.rand(length, generator=random),
        "trainer_logprobs": inference + torch.randn(length, generator=random) * 0.3,
        "entropy": torch.rand(length, generator=random),
    }
    weights = {name: columns[name] * columns["trained_mask"] for name in ("rl_weights", "ce_weights", "ref_kl_weights")}
    return columns | weights


def packed(sequences: Sequence[Columns], **more: Any) -> tuple[Batch, Batch]:
    """Sequences end to end."""
    joined = {name: torch.cat([columns[name] for columns in sequences]) for name in sequences[0]}
    return _named(joined, {"lengths": [len(columns["ids"]) for columns in sequences], **more})


def padded(sequences: Sequence[Columns], *, left: bool = False, width: int = 0, **more: Any) -> tuple[Batch, Batch]:
    """Sequences as rows of one width, and the mask that says what is padding."""
    width = max(width, *(len(columns["ids"]) for columns in sequences))

    def row(values: Tensor) -> Tensor:
        padding = torch.zeros(width - len(values), dtype=values.dtype)
        return torch.cat([padding, values] if left else [values, padding])

    rows = {name: torch.stack([row(columns[name]) for columns in sequences]) for name in sequences[0]}
    mask = torch.stack([row(torch.ones(len(columns["ids"]), dtype=torch.int64)) for columns in sequences])
    return _named(rows, {"attention_mask": mask, **more})


def _named(columns: Columns, more: Batch) -> tuple[Batch, Batch]:
    outputs = {"logprobs": columns["trainer_logprobs"]}
    if "entropy" in columns:
        outputs["entropy"] = columns["entropy"]
    batch = {name: values for name, values in columns.items() if name not in ("trainer_logprobs", "entropy", "ids")}
    return {"input_ids": columns["ids"], **batch, **more}, outputs


def exported(
    run: Path,
    *batches: tuple[Batch | None, Batch],
    loss: LossSpec | None = None,
    file_format: Format = Format.PARQUET,
    **options: Any,
) -> list[TokenRecord]:
    """What can be read after one rank has exported the micro-batches of one step."""
    with TokenExporter(run, rank=0, world_size=1, loss=loss, file_format=file_format, **options) as exporter:
        for micro_step, (batch, outputs) in enumerate(batches):
            exporter.export(7, micro_step, batch, outputs)
        exporter.mark_stable(7)
    assert exporter.report().problems == ()
    return list(read_tokens(run))


def spelled(record: TokenRecord) -> dict[str, Any]:
    """Everything in a record, as values that compare exactly."""
    facts: dict[str, Any] = {
        name: getattr(record, name) for name in ("sample", "rollout", "group", "env", "versions", "reward", "loss")
    }
    facts["reward"] = repr(record.reward)
    return facts | {name: (values.dtype.str, values.tobytes()) for name, values in record.columns().items()}
