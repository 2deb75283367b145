"""The weight of a sequence, and which pass over a step's samples it belongs to, are part of a token record."""

from pathlib import Path

import msgspec
import pytest
import torch

from rolltape.errors import MisalignedError
from rolltape.tokens import Format, TokenExporter, list_steps, read_tokens
from token_batches import packed, sequence_columns


@pytest.mark.parametrize("file_format", list(Format))
@pytest.mark.parametrize("given", [[0.25, 0.75], torch.tensor([0.25, 0.75])])
def test_loss_weights_and_epochs_come_back_from_the_files(tmp_path: Path, file_format: Format, given: object) -> None:
    batch, outputs = packed([sequence_columns(5), sequence_columns(7)], loss_weights=given)
    with TokenExporter(tmp_path, rank=0, world_size=1, file_format=file_format, sample_fraction=0.999) as exporter:
        exporter.export(3, 0, batch, outputs)
        exporter.export(3, 1, batch, outputs, epoch=1)
        exporter.mark_stable(3)
    records = list(read_tokens(tmp_path))
    assert [(record.loss_weight, record.epoch) for record in records] == [(0.25, 0), (0.75, 0), (0.25, 1), (0.75, 1)]
    (step,) = list_steps(tmp_path)
    assert [done.sample_fraction for done in step.ranks] == [0.999]


def test_records_without_them_have_no_weight_and_are_of_the_first_pass(tmp_path: Path) -> None:
    with TokenExporter(tmp_path, rank=0, world_size=1, file_format="jsonl") as exporter:
        exporter.export(3, 0, *packed([sequence_columns(5)]))
        exporter.mark_stable(3, wait=True)
    path = tmp_path / "token_exports" / "step_3" / "rank_0.jsonl"
    row = msgspec.json.decode(path.read_bytes())
    assert (row.pop("epoch"), row.pop("loss_weight")) == (0, None)
    path.write_bytes(msgspec.json.encode(row).ljust(path.stat().st_size - 1) + b"\n")  # as prime-rl itself writes
    (record,) = read_tokens(tmp_path)
    assert (record.epoch, record.loss_weight) == (0, None)


def test_loss_weights_of_another_number_than_the_sequences_are_refused(tmp_path: Path) -> None:
    batch, outputs = packed([sequence_columns(5), sequence_columns(7)], loss_weights=[0.25, 0.5, 0.25])
    with (
        TokenExporter(tmp_path, rank=0, world_size=1) as exporter,
        pytest.raises(MisalignedError, match="there are 2 sequences, but 3 loss_weights; give one for each"),
    ):
        exporter.export(3, 0, batch, outputs)
