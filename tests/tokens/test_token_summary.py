"""What is said of a step in figures is what a plain computation over all its tokens says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolltape.records.token_record import TokenRecord
from rolltape.tokens import Dppo
from rolltape.tokens.summary import QUANTILES, largest_tokens, sequence_figures, summarize_step
from token_batches import exported, packed, sequence_columns


def step_of(folder: Path) -> list[TokenRecord]:
    """Records of all lengths, in which some numbers are not finite."""
    sequences = [sequence_columns(length, seed=length) for length in (3, 40, 500, 2, 1000)]
    for columns in sequences:
        places = torch.rand(len(columns["ids"]), generator=torch.Generator().manual_seed(1))
        columns["trainer_logprobs"][places < 0.1] = float("nan")
        columns["inference_logprobs"][places > 0.95] = float("-inf")
    sequences.append({**sequence_columns(4), "trainer_logprobs": torch.full((4,), float("nan"))})
    records = exported(folder, packed(sequences), loss=Dppo())
    assert len(records) == 6
    return records


def trained(records: list[TokenRecord], column: str) -> Any:
    joined = np.concatenate([getattr(record, column)[record.trained_mask] for record in records])
    return joined.astype(np.float64)


def finite(values: Any) -> Any:
    return values[np.isfinite(values)]


def test_a_steps_figures_are_those_of_its_trained_tokens(tmp_path: Path) -> None:
    records = step_of(tmp_path)
    figures = summarize_step(7, records)
    assert figures.records == 6
    assert figures.tokens == sum(map(len, records))
    assert figures.trained_tokens == len(trained(records, "ratio"))
    for name in ("mismatch_kl", "entropy", "masked", "masked_high", "masked_low"):
        assert getattr(figures, name) == pytest.approx(finite(trained(records, name)).mean(), rel=1e-6), name
    assert figures.max_mismatch_kl == finite(trained(records, "mismatch_kl")).max()
    ratios = trained(records, "ratio")
    assert figures.ratio_quantiles == pytest.approx(np.quantile(finite(ratios), QUANTILES), rel=1e-6)
    assert figures.not_finite == np.count_nonzero(~np.isfinite(ratios)) > 0


def test_the_worst_sequences_are_those_with_the_largest_mean(tmp_path: Path) -> None:
    records = step_of(tmp_path)
    means = {record.place: finite(trained([record], "mismatch_kl")) for record in records}
    ranked = sorted((place for place in means if len(means[place])), key=lambda place: -means[place].mean())
    assert [one.place for one in summarize_step(7, records, worst=10).worst] == ranked
    assert "7.0.5" not in ranked, "it has no finite mismatch at all"
    assert sequence_figures(records[5]).mismatch_kl is None


@pytest.mark.parametrize("column", ["mismatch_kl", "entropy", "masked"])
def test_outliers_are_the_largest_of_all(column: str, tmp_path: Path) -> None:
    records = step_of(tmp_path)
    key: Callable[[float], float] = lambda value: np.inf if np.isnan(value) else value  # noqa: E731
    everything = sorted(map(key, trained(records, column)), reverse=True)
    found = largest_tokens(iter(records), column, 200)
    assert [key(one.value) for one in found] == everything[:200]
    assert len({(one.record.place, one.at) for one in found}) == 200
    assert all(one.record.trained_mask[one.at] for one in found)


def test_a_step_without_records_has_no_figures() -> None:
    figures = summarize_step(3, [])
    assert (figures.records, figures.mismatch_kl, figures.ratio_quantiles, figures.worst) == (0, None, None, ())
