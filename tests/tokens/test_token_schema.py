"""The columns of token records are declared once, and files of 0.1.0 are read as before."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import rolltape.tokens
from rolltape.records.token_record import FACT_COLUMNS, TOKEN_COLUMNS, TokenRecord
from rolltape.tokens import read_step
from rolltape.tokens.parquet import SCHEMA

OLD_RUN = Path(__file__).parent / "written_by_0_1_0"


def test_every_field_of_a_record_is_a_column_of_its_file() -> None:
    assert [*FACT_COLUMNS, "tokens", "trained_tokens", *TOKEN_COLUMNS] == SCHEMA.names
    assert [*FACT_COLUMNS, *TOKEN_COLUMNS] == list(TokenRecord.__struct_fields__)
    assert {name for name, column in TOKEN_COLUMNS.items() if not column.optional} == {
        "ids",
        "position_ids",
        "trained_mask",
        "trainer_logprobs",
    }
    types = {name: SCHEMA.field(name).type for name in ("step", "rank", "reward", "versions", "sample")}
    assert types == {
        "step": pa.int64(),
        "rank": pa.int32(),
        "reward": pa.float64(),
        "versions": pa.list_(pa.string()),
        "sample": pa.string(),
    }


def test_records_that_0_1_0_wrote_are_read() -> None:
    jsonl, parquet = rolltape.tokens.list_steps(OLD_RUN)
    assert (jsonl.file_format, parquet.file_format, jsonl.stable, parquet.stable) == ("jsonl", "parquet", True, True)
    for step in (jsonl, parquet):
        first, second = read_step(step)
        assert (first.place, second.place) == ("3.0.0", "3.0.1")
        assert (first.sample, first.rollout, first.group) == ("857bc8a1.0.0.3@exact-f85863f1", "857bc8a1", "g1")
        assert (first.env, first.versions, first.reward) == ("maths", ("v1", "v2"), 1.0)
        assert (second.sample, second.env, second.versions, second.reward) == (None, None, (), None)
        assert rolltape.tokens.parse_loss(first.loss or "") == rolltape.tokens.Dppo()
        assert (first.ids.tolist(), first.position_ids.tolist()) == ([5, 6, 7], [0, 1, 2])
        assert first.trained_mask.tolist() == [False, True, True]
        assert str(first.trainer_logprobs.tolist()) == "[nan, -0.5, -0.125]"
        assert first.log_ratio is not None
        assert first.log_ratio[1:].tolist() == [0.0, 0.875]
        assert second.masked_low is not None
        assert second.masked_low.tolist() == [False, True]
        assert first.old_logprobs is None
        assert first.rl_weights is None
        assert first.ids.dtype == np.int32
        assert first.trainer_logprobs.dtype == np.float32


@pytest.mark.parametrize(
    ("old", "new"),
    [("steps_of", "list_steps"), ("records_of", "read_step"), ("scored", "score_sample"), ("loss_of", "parse_loss")],
)
def test_names_of_0_1_0_warn_and_work(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated; use {new}"):
        found = getattr(rolltape.tokens, old)
    assert found is getattr(rolltape.tokens, new)
