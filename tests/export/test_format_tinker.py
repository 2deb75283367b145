"""Datums are made of Tinker's own types, and its importance-sampling loss sees in them what was recorded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from exported import a_sample
from framework_samples import CLOSE, causal_model, recorded_group, shifted
from rolltape.errors import ExportError
from rolltape.export.formats import datums, write_samples_for
from rolltape.records.sample import Sample

pytestmark = pytest.mark.filterwarnings("ignore::rolltape.export.formats.LeftOutWarning")


def datum_of(row: dict[str, Any]) -> tinker.Datum:
    """The real type out of a row, as the page shows it."""
    inputs = {name: tinker.TensorData(**tensor) for name, tensor in row["loss_fn_inputs"].items()}
    return tinker.Datum(model_input=tinker.ModelInput.model_validate(row["model_input"]), loss_fn_inputs=inputs)


def importance_sampling_loss(datum: tinker.Datum, logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The loss as Tinker documents it: minus the sum of ratio times advantage, over the targets."""
    advantages = datum.loss_fn_inputs["advantages"].to_torch()
    return -(torch.exp(logprobs - old) * advantages).sum()


def target_logprobs(datum: tinker.Datum) -> torch.Tensor:
    """The model's logprob of each target, given the inputs up to it."""
    inputs = torch.tensor([datum.model_input.to_ints()])
    targets = datum.loss_fn_inputs["target_tokens"].to_torch()
    found: torch.Tensor = causal_model()(inputs).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return found


def test_inputs_targets_and_columns_are_aligned_to_the_recorded_ids(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path, forked=True)
    for sample, row in zip(samples, datums(samples, mask=True), strict=True):
        datum = datum_of(row)
        columns = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
        assert datum.model_input.to_ints() == sample.ids[:-1].tolist()
        assert {column.shape for column in columns.values()} == {(datum.model_input.length,)}
        assert columns["target_tokens"].tolist() == sample.ids[1:].tolist()
        trained = sample.trained_mask[1:]
        assert columns["mask"].astype(bool).tolist() == trained.tolist()
        assert columns["advantages"].tolist() == np.where(trained, np.float32(sample.advantage), 0).tolist()
        assert columns["logprobs"][trained].tolist() == sample.logprobs[1:][trained].astype(np.float32).tolist()
        assert not columns["logprobs"][~trained].any()


def test_a_request_of_the_service_takes_the_datums(tmp_path: Path) -> None:
    made = [datum_of(row) for row in datums(recorded_group(tmp_path))]
    asked = tinker.types.ForwardBackwardInput(data=made, loss_fn="importance_sampling")
    assert [sorted(datum.loss_fn_inputs) for datum in asked.data] == [["advantages", "logprobs", "target_tokens"]] * 3


def test_the_loss_at_a_ratio_of_one_is_minus_the_advantages_and_a_shift_shows(tmp_path: Path) -> None:
    for sample, row in zip(recorded_group(tmp_path), datums(recorded_group(tmp_path / "again")), strict=True):
        datum = datum_of(row)
        old = datum.loss_fn_inputs["logprobs"].to_torch()
        logprobs = target_logprobs(datum).detach().requires_grad_()
        loss = importance_sampling_loss(datum, logprobs, old)
        assert sample.advantage is not None
        assert loss.item() == pytest.approx(-sample.advantage * sample.trained_tokens, abs=1e-3)
        loss.backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        assert (logprobs.grad != 0).tolist() == sample.trained_mask[1:].tolist()
        trained = torch.from_numpy(sample.trained_mask[1:])
        assert (logprobs - old)[trained].abs().max() < CLOSE
        assert (logprobs - shifted(old))[trained].abs().max() > 0.5


def test_lines_of_the_file_are_the_datums(tmp_path: Path) -> None:
    samples = recorded_group(tmp_path)
    write_samples_for("tinker", samples, tmp_path / "datums.jsonl")
    assert [json.loads(line) for line in (tmp_path / "datums.jsonl").read_text().splitlines()] == datums(samples)


def test_a_sample_without_an_advantage_is_refused() -> None:
    def without(**changes: Any) -> Sample:
        return a_sample(advantage=None, **changes)

    with pytest.raises(ExportError, match=r"tinker needs an advantage, but 2 of 3 samples have none, first first; "):
        datums([without(id="first"), a_sample(advantage=0.5), without(id="second")])
