"""What a trainer hands over, and the records that it becomes."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rolltape.errors import MisalignedError, RecordError
from rolltape.records.token_record import TOKEN_COLUMNS
from rolltape.tokens import (
    Dppo,
    ExportReport,
    Format,
    OnPolicyDistillation,
    PpoClip,
    TokenExporter,
    list_steps,
    read_tokens,
)
from rolltape.tokens.snapshot import has_streams
from token_batches import exported, packed, padded, sequence_columns, spelled

SEQUENCES = [sequence_columns(length, seed=length) for length in (5, 1, 9, 3)]
FACTS: dict[str, Any] = {
    "sample_ids": ["a.0.0.1@exact-1", None, "c", "d"],
    "rollout_ids": ["a", "b", "c", "d"],
    "groups": ["g", "g", "h", "h"],
    "env_names": ["math", "math", None, "code"],
    "weight_versions": ["7", ["7", "8"], None, 9],
    "rewards": [1.0, 0.1, -2.5, float("nan")],
}


def trained_everywhere() -> list[dict[str, torch.Tensor]]:
    return [{**columns, "trained_mask": torch.ones(len(columns["ids"]), dtype=torch.bool)} for columns in SEQUENCES]


def test_every_column_comes_back_as_it_was_given(tmp_path: Path) -> None:
    sequences = trained_everywhere()
    records = exported(tmp_path, packed(sequences), loss=Dppo())
    assert [record.place for record in records] == ["7.0.0", "7.0.1", "7.0.2", "7.0.3"]
    for record, columns in zip(records, sequences, strict=True):
        assert set(record.columns()) == set(TOKEN_COLUMNS)
        for name, values in columns.items():
            assert np.array_equal(record.columns()[name], values.numpy()), name


def test_what_is_derived_follows_its_definition(tmp_path: Path) -> None:
    (record,) = exported(tmp_path, packed([sequence_columns(500)]))
    columns = {name: values.astype(np.float64) for name, values in record.columns().items()}
    log_ratio = columns["trainer_logprobs"] - columns["inference_logprobs"]
    assert np.allclose(columns["log_ratio"], log_ratio, rtol=1e-5, atol=1e-6)
    assert np.allclose(columns["ratio"], np.exp(log_ratio), rtol=1e-5)
    assert np.allclose(columns["mismatch_kl"], np.exp(log_ratio) - log_ratio - 1, rtol=1e-4, atol=1e-7)
    delta = np.exp(columns["trainer_logprobs"]) - np.exp(columns["inference_logprobs"])
    assert np.allclose(columns["prob_delta"], delta, atol=1e-6)
    assert record.masked is None, "no loss was named, so nothing is said about masks"


def test_a_tiny_mismatch_is_not_lost_in_rounding(tmp_path: Path) -> None:
    columns = sequence_columns(100)
    columns["inference_logprobs"] = torch.zeros(100)
    columns["trainer_logprobs"] = torch.linspace(-1e-3, 1e-3, 100)
    (record,) = exported(tmp_path, packed([columns]))
    assert record.mismatch_kl is not None
    assert (record.mismatch_kl >= 0).all()
    assert np.allclose(record.mismatch_kl, np.linspace(-1e-3, 1e-3, 100) ** 2 / 2, rtol=0.01, atol=1e-12)


@pytest.mark.parametrize("left", [False, True], ids=["padded right", "padded left"])
def test_packed_and_padded_batches_give_the_same_records(left: bool, tmp_path: Path) -> None:
    end_to_end, outputs = packed(trained_everywhere(), **FACTS)
    bounds = {**end_to_end, "cu_seqlens": torch.tensor([0, 5, 6, 15, 18], dtype=torch.int32), "lengths": None}
    flat = exported(tmp_path / "lengths", (end_to_end, outputs), loss=Dppo())
    cumulated = exported(tmp_path / "bounds", (bounds, outputs), loss=Dppo())
    rows = exported(tmp_path / "rows", padded(trained_everywhere(), left=left, width=12, **FACTS), loss=Dppo())
    assert len(flat) == 4
    assert list(map(spelled, flat)) == list(map(spelled, cumulated)) == list(map(spelled, rows))


def test_what_is_said_of_a_sequence_is_kept(tmp_path: Path) -> None:
    records = exported(tmp_path, packed(trained_everywhere(), **FACTS), loss=PpoClip(clip_high=0.28))
    assert [record.sample for record in records] == FACTS["sample_ids"]
    assert [record.rollout for record in records] == FACTS["rollout_ids"]
    assert [record.group for record in records] == FACTS["groups"]
    assert [record.env for record in records] == FACTS["env_names"]
    assert [record.versions for record in records] == [("7",), ("7", "8"), (), ("9",)]
    assert [record.reward for record in records[:3]] == FACTS["rewards"][:3]
    assert np.isnan(records[3].reward or 0.0)
    assert json.loads(records[0].loss or "") == {
        "type": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": None,
    }
    (row, *_) = pq.read_table(tmp_path / "tokens" / "step_7" / "rank_0.parquet").to_pylist()
    assert (row["tokens"], row["trained_tokens"]) == (5, 5)


def test_what_is_said_of_a_sequence_may_lie_in_tensors_and_arrays(tmp_path: Path) -> None:
    told = {
        "sample_ids": np.array([3, 4, 5, 6]),
        "rollout_ids": torch.tensor([1, 2, 3, 4]),
        "groups": [torch.tensor(7), np.int64(8), "g\ud800", None],
        "weight_versions": [torch.tensor([7, 7, 8]), np.array([9]), torch.tensor(3), {4}],
    }
    records = exported(tmp_path, packed(trained_everywhere(), **told))
    assert [record.sample for record in records] == ["3", "4", "5", "6"]
    assert [record.rollout for record in records] == ["1", "2", "3", "4"]
    assert [record.group for record in records] == ["7", "8", "g?", None]
    assert [record.versions for record in records] == [("7", "8"), ("9",), ("3",), ("4",)]


def test_a_sequence_may_be_without_a_reward(tmp_path: Path) -> None:
    records = exported(tmp_path, packed(trained_everywhere(), rewards=[0.1, None, float("inf"), 3]))
    assert [record.reward for record in records] == [0.1, None, float("inf"), 3.0]
    assert all(record.rewards is None for record in records)


def test_a_reward_that_is_a_whole_number_is_not_rounded(tmp_path: Path) -> None:
    records = exported(tmp_path, packed(trained_everywhere(), rewards=[16_777_217, 1, 2, 3]))
    assert [record.reward for record in records] == [16_777_217, 1, 2, 3]


def test_rows_may_come_with_their_lengths_instead_of_a_mask(tmp_path: Path) -> None:
    batch, outputs = padded(trained_everywhere(), **FACTS)
    by_mask = exported(tmp_path / "mask", (batch, outputs), loss=Dppo())
    lengths = {**batch, "attention_mask": None, "lengths": torch.tensor([5, 1, 9, 3])}
    by_lengths = exported(tmp_path / "lengths", (lengths, outputs), loss=Dppo())
    both = exported(tmp_path / "both", ({**batch, "lengths": [5, 1, 9, 3]}, outputs), loss=Dppo())
    assert list(map(spelled, by_lengths)) == list(map(spelled, both)) == list(map(spelled, by_mask))
    with pytest.raises(MisalignedError, match="rows of 9 tokens have the lengths 5, 1, 10, 3"):
        exported(tmp_path, ({**lengths, "lengths": [5, 1, 10, 3]}, outputs))


def test_padding_at_the_end_of_a_packed_batch_may_be_sequences_of_its_own(tmp_path: Path) -> None:
    batch, outputs = packed([*trained_everywhere(), sequence_columns(4, trained=[False] * 4)])
    bounds = {**batch, "lengths": None, "cu_seqlens": torch.tensor([0, 5, 6, 15, 18, 22, 22, 22])}
    assert [len(record) for record in exported(tmp_path, (bounds, outputs))] == [5, 1, 9, 3]


def test_lengths_may_go_by_prime_rls_name(tmp_path: Path) -> None:
    batch, outputs = packed(trained_everywhere(), **FACTS)
    rows = {name: values[None] for name, values in batch.items() if isinstance(values, torch.Tensor)}
    theirs = {**batch, **rows, "lengths": None, "sequence_lengths": batch["lengths"], "seq_lens": torch.tensor([18])}
    by_theirs = exported(tmp_path / "theirs", (theirs, outputs), loss=Dppo())
    assert list(map(spelled, by_theirs)) == list(map(spelled, exported(tmp_path, (batch, outputs), loss=Dppo())))
    with pytest.raises(RecordError, match="batch has both lengths and sequence_lengths; give one"):
        exported(tmp_path / "both", ({**theirs, "lengths": [18]}, outputs))


@pytest.mark.parametrize("shape", [(18,), (1, 18)], ids=str)
def test_one_row_that_may_be_several_sequences_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    batch, outputs = packed(trained_everywhere())
    batch = {name: values.reshape(shape) for name, values in batch.items() if isinstance(values, torch.Tensor)}
    with TokenExporter(tmp_path / "positions", rank=0, world_size=1) as exporter:
        exporter.export(7, 0, batch, outputs)
    (problem,) = exporter.report().problems
    assert "position_ids start over within a row, first at token 5, so it is several sequences; give lengths" in problem
    assert exporter.report().lost_records == 1
    with pytest.raises(MisalignedError, match="18 tokens in one row, and nothing says whether they are one sequence"):
        exported(tmp_path, ({**batch, "position_ids": None}, outputs))


def test_one_row_that_is_known_to_be_a_sequence_is_taken(tmp_path: Path) -> None:
    batch, outputs = packed([sequence_columns(9, trained=[True] * 9)])
    batch["lengths"] = None
    ways: list[dict[str, Any]] = [{}, {"attention_mask": torch.ones(9)}, {"sample_ids": ["a"]}]
    for number, way in enumerate(ways):
        given = {**batch, **way} if not way else {**batch, "position_ids": None, **way}
        assert [len(record) for record in exported(tmp_path / str(number), (given, outputs))] == [9]


def test_padded_rows_may_have_any_positions_in_their_padding(tmp_path: Path) -> None:
    records = exported(tmp_path, padded(trained_everywhere(), left=True, width=12))
    assert [record.position_ids.tolist() for record in records] == [list(range(n)) for n in (5, 1, 9, 3)]


@pytest.fixture
def two_ranks() -> Iterator[DeviceMesh]:
    """A mesh of two ranks, one of which is this process; nothing is sent to the other."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_a_tensor_that_is_whole_on_this_rank_is_taken_and_one_that_is_spread_is_refused(
    two_ranks: DeviceMesh, tmp_path: Path
) -> None:
    batch, outputs = packed(trained_everywhere())
    expected = exported(tmp_path / "plain", (batch, outputs))
    whole = {name: DTensor.from_local(values, two_ranks, [Replicate()]) for name, values in outputs.items()}
    found = exported(tmp_path / "whole", (batch, whole))
    assert list(map(spelled, found)) == list(map(spelled, expected))
    spread = {"logprobs": DTensor.from_local(outputs["logprobs"][:9], two_ranks, [Shard(0)])}
    with pytest.raises(RecordError, match=r"logprobs is a DTensor that is spread over ranks: .*give its full_tensor"):
        exported(tmp_path / "spread", (batch, spread))


def test_a_nested_tensor_is_refused(tmp_path: Path) -> None:
    batch, outputs = packed(trained_everywhere())
    nested = torch.nested.nested_tensor([outputs["logprobs"][:5], outputs["logprobs"][5:]], layout=torch.jagged)
    with pytest.raises(RecordError, match=r"logprobs is a nested tensor; give its values\(\)"):
        exported(tmp_path, (batch, {"logprobs": nested}))


def test_a_shard_of_a_context_parallel_rank_is_refused(tmp_path: Path) -> None:
    batch, outputs = packed([sequence_columns(16, trained=[True] * 16)])
    options: dict[str, Any] = {"rank": 0, "world_size": 2, "context_parallel_size": 2}
    with TokenExporter(tmp_path / "a", **options) as exporter:
        with pytest.raises(MisalignedError, match="gather what is sharded over context-parallel ranks"):
            exporter.export(0, 0, batch, {"logprobs": outputs["logprobs"][:8]})
        with pytest.raises(MisalignedError, match="add up to 16 tokens, but the columns have 8"):
            exporter.export(0, 0, {**_take(batch, range(8)), "lengths": [16]}, _take(outputs, range(8)))
        # The first rank of two has the first and the last quarter of a sequence, where the work is to be shared evenly.
        own = [*range(4), *range(12, 16)]
        exporter.export(0, 1, {**_take(batch, own), "lengths": [8]}, _take(outputs, own))
    assert exporter.report().problems[0] == (
        "step 0, micro step 1: position_ids go from 3 to 12, so this is the shard of one of 2 context-parallel ranks; "
        "gather whole sequences first"
    )
    with TokenExporter(tmp_path / "b", **options) as exporter:
        exporter.export(0, 0, batch, outputs)
        exporter.mark_stable(0)
    assert exporter.report().records == 1


def _take(given: dict[str, Any], at: Sequence[int]) -> dict[str, Any]:
    return {name: values[list(at)] for name, values in given.items() if isinstance(values, torch.Tensor)}


def test_any_accelerator_with_streams_is_copied_from_behind_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the columns arrive is checked on CUDA, with streams and without, by check_on_gpu.py."""
    streams = ("Stream", "Event", "current_stream")
    accelerators = {"cuda": streams, "xpu": streams, "mps": ("Event",), "cpu": streams}

    def module(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(**dict.fromkeys(accelerators[device.type]))

    monkeypatch.setattr(torch, "get_device_module", module)
    assert [name for name in accelerators if has_streams(torch.device(name))] == ["cuda", "xpu"]


def test_arrays_that_torch_does_not_take_are_taken(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    batch, outputs = packed(trained_everywhere())
    ids = batch["input_ids"].numpy().copy()
    ids.flags.writeable = False
    backwards = {**batch, "input_ids": ids, "advantages": np.arange(18.0)[::-1]}
    records = exported(tmp_path, (backwards, outputs))
    assert np.concatenate([record.ids for record in records]).tolist() == ids.tolist()
    assert np.concatenate([record.advantages for record in records]).tolist() == list(range(17, -1, -1))
    assert not recwarn.list


def test_where_torch_makes_its_tensors_by_default_does_not_matter(tmp_path: Path) -> None:
    batch, outputs = packed(trained_everywhere(), rewards=[1.0, 2.0, 3.0, 4.0])
    each = {**batch, "advantages": [0.5, -0.5, 1.0, 0.0]}
    torch.set_default_device("meta")
    try:
        records = exported(tmp_path, (each, outputs), loss=Dppo())
    finally:
        torch.set_default_device(None)
    assert [len(record) for record in records] == [5, 1, 9, 3]
    assert [record.advantages[0] for record in records if record.advantages is not None] == each["advantages"]


@pytest.mark.parametrize("batch_size", [[4], []], ids=str)
def test_a_tensordict_is_a_batch(batch_size: list[int], tmp_path: Path) -> None:
    batch, outputs = padded(trained_everywhere())
    given = (TensorDict(batch, batch_size=batch_size), TensorDict(outputs, batch_size=batch_size))
    assert len(exported(tmp_path, given, loss=Dppo())) == 4


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    for file_format in Format:
        folder = tmp_path / file_format
        with TokenExporter(
            folder,
            rank=np.int64(0),
            world_size=torch.tensor(1),
            context_parallel_size=np.int64(1),
            file_format=file_format,
        ) as exporter:
            for micro_step in np.arange(3):
                exporter.export(torch.tensor(5), micro_step, *packed(trained_everywhere()))
            exporter.mark_stable(np.int32(5))
        assert exporter.report().problems == ()
        assert [(record.step, record.micro_step) for record in read_tokens(folder, stable_only=True)] == [
            (5, micro_step) for micro_step in range(3) for _ in range(4)
        ]


@pytest.mark.parametrize(("step", "said"), [(-1, "step is -1; give 0 or more"), (1.5, "step is 1.5; give a whole")])
def test_a_step_that_is_no_number_of_a_step_is_refused(step: Any, said: str, tmp_path: Path) -> None:
    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        with pytest.raises(RecordError, match=said):
            exporter.export(step, 0, *packed(trained_everywhere()))
        with pytest.raises(RecordError, match=said):
            exporter.mark_stable(step)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_an_advantage_per_sequence_stands_for_its_tokens(shape: tuple[int, ...], tmp_path: Path) -> None:
    advantages = torch.tensor([0.5, -0.5, 1.0, 0.0]).reshape(shape)
    for name, (batch, outputs) in {"a": packed(trained_everywhere()), "b": padded(trained_everywhere())}.items():
        one_loss = {**batch, "advantages": advantages, "ce_weights": None, "ref_kl_weights": None}
        records = exported(tmp_path / name, (one_loss, outputs), loss=Dppo())
        for record, advantage in zip(records, advantages.reshape(-1).tolist(), strict=True):
            assert record.advantages is not None
            assert set(record.advantages.tolist()) == {advantage}
        assert records[3].masked is not None
        assert records[3].masked.all(), "no advantage, no gradient"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_widened_not_rounded_again(dtype: torch.dtype, tmp_path: Path) -> None:
    columns = sequence_columns(300)
    half = {name: values.to(dtype) if values.is_floating_point() else values for name, values in columns.items()}
    (record,) = exported(tmp_path / "half", packed([half]))
    wide = {name: values.float() if values.is_floating_point() else values for name, values in half.items()}
    (expected,) = exported(tmp_path / "wide", packed([wide]))
    assert spelled(record) == spelled(expected)


def test_numbers_that_are_not_finite_survive(tmp_path: Path) -> None:
    columns = sequence_columns(6)
    strange = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-45])
    columns |= {name: strange.clone() for name in columns if TOKEN_COLUMNS[name].dtype is np.float32}
    (record,) = exported(tmp_path, packed([columns]))
    for name in (name for name in columns if TOKEN_COLUMNS[name].dtype is np.float32):
        assert record.columns()[name].tobytes() == strange.numpy().tobytes(), name


def test_positions_are_counted_where_none_are_given(tmp_path: Path) -> None:
    sequences = [{**columns} for columns in trained_everywhere()]
    for columns in sequences:
        del columns["position_ids"]
    for name, batch in {"a": packed(sequences), "b": padded(sequences, left=True)}.items():
        records = exported(tmp_path / name, batch)
        assert [record.position_ids.tolist() for record in records] == [list(range(n)) for n in (5, 1, 9, 3)]


@pytest.mark.parametrize("nothing", [None, {}], ids=["None", "empty"])
def test_a_batch_that_is_not_there_is_counted(nothing: Any, tmp_path: Path) -> None:
    batch = packed(trained_everywhere())
    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        exporter.export(0, 0, nothing, {})
        exporter.export(0, 1, *batch)
        exporter.export(0, 2, *packed([sequence_columns(0)]))
        exporter.mark_stable(0)
    assert exporter.report().empty_batches == 2
    assert {record.micro_step for record in read_tokens(tmp_path)} == {1}


def test_sequences_that_do_not_train_are_left_out(tmp_path: Path) -> None:
    untrained = [sequence_columns(4, trained=[False] * 4), sequence_columns(0), *trained_everywhere()]
    padding = sequence_columns(6, trained=[False] * 6)
    batch, outputs = padded([*untrained, padding])
    batch["attention_mask"][-1] = 0
    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        exporter.export(0, 0, batch, outputs)
        exporter.export(0, 1, *packed([padding, padding]))
        exporter.mark_stable(0)
    assert exporter.report().untrained_sequences == 5
    assert [record.micro_sequence for record in read_tokens(tmp_path)] == [2, 3, 4, 5]
    assert [record.sequence for record in read_tokens(tmp_path)] == [0, 1, 2, 3]


def test_every_sequence_is_accounted_for(tmp_path: Path) -> None:
    sequences = [sequence_columns(6, trained=[number % 3 > 0] * 6) for number in range(60)]
    with TokenExporter(tmp_path, rank=0, world_size=1, sample_fraction=0.5) as exporter:
        exporter.export(0, 0, *packed(sequences))
        exporter.mark_stable(0)
    report = exporter.report()
    assert (report.sequences, report.untrained_sequences) == (60, 20)
    assert report.records + report.unsampled_sequences == 40
    assert report.records == len(list(read_tokens(tmp_path))) not in (0, 40)


def test_the_callers_tensors_are_let_go(tmp_path: Path) -> None:
    import gc
    import weakref

    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        batch, outputs = packed(trained_everywhere())
        alive = weakref.ref(outputs["logprobs"].untyped_storage())
        exporter.export(0, 0, batch, outputs)
        del batch, outputs
        gc.collect()
        assert alive() is None
        exporter.mark_stable(0)


def test_a_step_without_a_record_is_stable_too(tmp_path: Path) -> None:
    assert exported(tmp_path, packed([sequence_columns(4, trained=[False] * 4)])) == []
    (step,) = list_steps(tmp_path)
    assert step.stable


def test_a_mask_in_pieces_keeps_what_lies_between(tmp_path: Path) -> None:
    mask = [False, True, True, False, False, True, False, True, False]
    columns = sequence_columns(9, trained=mask)
    (record,) = exported(tmp_path, padded([columns, sequence_columns(12, trained=[False] * 12)]))
    assert record.trained_mask.tolist() == mask
    assert record.ids.tolist() == columns["ids"].tolist()


def test_padding_in_a_packed_batch_is_cut(tmp_path: Path) -> None:
    first, second = sequence_columns(4, trained=[True] * 4), sequence_columns(6, trained=[False, True] + [False] * 4)
    batch, outputs = packed([first, second])
    mask = {**batch, "attention_mask": torch.tensor([[1] * 8 + [0] * 2])}
    names = {**batch, "env_names": ["math"] * 4 + ["code"] * 4 + [""] * 2}
    by_mask = exported(tmp_path / "mask", (mask, outputs))
    by_name = exported(tmp_path / "name", (names, outputs))
    assert [len(record) for record in by_mask] == [len(record) for record in by_name] == [4, 4]
    assert [record.env for record in by_name] == ["math", "code"]


def test_getting_ready_writes_nothing(tmp_path: Path) -> None:
    for loss in (None, Dppo(), PpoClip(), OnPolicyDistillation()):
        with TokenExporter(tmp_path, rank=0, world_size=1, loss=loss) as exporter:
            exporter.reserve(1000, in_flight=3)
        assert exporter.report() == ExportReport()
    assert not list(tmp_path.rglob("step_*"))


def test_later_changes_to_the_batch_do_not_show(tmp_path: Path) -> None:
    names = {"sample_ids": ["a", "b", "c", "d"], "weight_versions": [["7"], ["7"], ["7"], ["7"]]}
    batch, outputs = packed(trained_everywhere(), **names)
    before = {name: value.clone() for name, value in {**batch, **outputs}.items() if isinstance(value, torch.Tensor)}
    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter:
        exporter.export(0, 0, batch, outputs)
        for name in before:
            (batch if name in batch else outputs)[name].zero_()
        batch["sample_ids"][0] = "changed"
        batch["weight_versions"][0].append("8")
        exporter.mark_stable(0)
    records = list(read_tokens(tmp_path))
    assert records[0].sample == "a"
    assert records[0].versions == ("7",)
    joined = np.concatenate([record.trainer_logprobs for record in records])
    assert np.array_equal(joined, before["logprobs"].numpy())


def test_gradients_are_left_alone(tmp_path: Path) -> None:
    batch, outputs = packed(trained_everywhere())
    outputs["logprobs"] = outputs["logprobs"].requires_grad_()
    assert len(exported(tmp_path, (batch, outputs), loss=Dppo())) == 4
    outputs["logprobs"].sum().backward()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loss_mask": torch.ones(18), "trained_mask": torch.ones(18)}, "both trained_mask and loss_mask"),
        ({"advantages": torch.ones(17)}, r"ids 18, .*advantages 17, .*trainer_logprobs 18"),
        ({"inference_logprobs": torch.ones(2, 9)}, r"ids 18, .*inference_logprobs 2×9"),
        ({"lengths": [5, 1, 9, 4]}, "4 sequences add up to 19 tokens, but the columns have 18"),
        ({"lengths": [19, -1]}, "a sequence has the length -1"),
        ({"lengths": None, "cu_seqlens": [1, 18]}, "does not begin with 0"),
        ({"lengths": None, "cu_seqlens": []}, "does not begin with 0"),
        ({"cu_seqlens": [0, 18]}, "both lengths and cu_seqlens"),
        ({"sample_ids": ["a", "b"]}, "there are 4 sequences, but sample_ids 2"),
        ({"attention_mask": torch.ones(17)}, "attention_mask 17"),
        ({"input_ids": None}, "batch has no input_ids"),
        ({"advantages": [[1.0], [1.0, 2.0]]}, "advantages cannot be a tensor"),
        ({"advantages": ["a"] * 18}, "advantages cannot be a tensor"),
        ({"trained_mask": None}, "batch has no trained_mask"),
    ],
    ids=lambda value: str(list(value))[:40] if isinstance(value, dict) else "",
)
def test_what_is_misaligned_is_refused_before_anything_is_written(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    batch, outputs = packed(trained_everywhere())
    with (
        TokenExporter(tmp_path, rank=0, world_size=1) as exporter,
        pytest.raises(RecordError, match=rf"step 3, micro step 1: .*{said}"),
    ):
        exporter.export(3, 1, {**batch, **change}, outputs)
    assert not list(tmp_path.rglob("step_*"))
    assert exporter.report().records == 0


def test_shifted_logprobs_are_refused(tmp_path: Path) -> None:
    batch, outputs = padded(trained_everywhere())
    shifted = {"logprobs": outputs["logprobs"][:, 1:]}
    with TokenExporter(tmp_path, rank=0, world_size=1) as exporter, pytest.raises(MisalignedError, match=r"4×9.*4×8"):
        exporter.export(0, 0, batch, shifted)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_a_fraction_is_the_same_on_every_rank(fraction: float, tmp_path: Path) -> None:
    sequences = [sequence_columns(3, trained=[True] * 3) for _ in range(400)]
    names = [f"sample {number}" for number in range(400)]
    batch = packed(sequences, sample_ids=names)
    here = {record.sample for record in exported(tmp_path / "a", batch, sample_fraction=fraction)}
    batch = packed(sequences[::-1], sample_ids=names[::-1])
    there = {record.sample for record in exported(tmp_path / "b", batch, sample_fraction=fraction)}
    assert here == there
    assert abs(len(here) - 400 * fraction) < 40


def test_only_every_nth_step_is_written(tmp_path: Path) -> None:
    with TokenExporter(tmp_path, rank=0, world_size=1, every_n_steps=3) as exporter:
        for step in range(7):
            exporter.export(step, 0, *packed(trained_everywhere()))
            exporter.mark_stable(step)
    assert [(step.step, step.stable) for step in list_steps(tmp_path)] == [(0, True), (3, True), (6, True)]


def test_context_parallel_ranks_other_than_the_first_write_nothing(tmp_path: Path) -> None:
    for rank in range(4):
        with TokenExporter(
            tmp_path, rank=rank, world_size=4, context_parallel_rank=rank % 2, context_parallel_size=2
        ) as exporter:
            exporter.export(0, 0, *packed(trained_everywhere()))
            exporter.mark_stable(0)
    (step,) = list_steps(tmp_path)
    assert step.stable
    assert [done.rank for done in step.ranks] == [0, 2]
    assert not list(tmp_path.rglob("*rank_1*")) + list(tmp_path.rglob("*rank_3*"))


def test_many_micro_batches_make_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltape.tokens.pipeline.PART_TOKENS", 100)
    records = exported(tmp_path, *[packed(trained_everywhere()) for _ in range(20)], threads=3)
    assert [record.sequence for record in records] == list(range(80))
    assert [record.micro_step for record in records] == [step for step in range(20) for _ in range(4)]
    assert len(list(tmp_path.rglob("*.parquet"))) == 4


def test_one_large_micro_batch_is_shared_among_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltape.tokens.pipeline.PART_TOKENS", 10)
    records = exported(tmp_path, packed(trained_everywhere() * 3), threads=2)
    assert [len(record) for record in records] == [5, 1, 9, 3] * 3
    assert [record.ids.tolist() for record in records] == [c["ids"].tolist() for c in trained_everywhere()] * 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 4, "world_size": 4}, "rank 4 of 4"),
        ({"sample_fraction": 1.5}, "sample_fraction is 1.5"),
        ({"every_n_steps": 0}, "every_n_steps is 0"),
        ({"file_format": "csv"}, "give parquet or jsonl"),
        ({"world_size": 3, "context_parallel_size": 2}, "context-parallel rank 0 of 2 in a world of 3"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=said):
        TokenExporter(tmp_path, **{"rank": 0, "world_size": 1, **options})


def test_reading_takes_only_the_columns_asked_for(tmp_path: Path) -> None:
    exported(tmp_path, packed(trained_everywhere()))
    (record, *_) = read_tokens(tmp_path, columns=["entropy"])
    assert set(record.columns()) == {"ids", "position_ids", "trained_mask", "trainer_logprobs", "entropy"}


def test_nothing_but_the_exporter_needs_torch() -> None:
    import subprocess
    import sys

    code = "import sys, rolltape.cli.app, rolltape.tokens, rolltape.tokens.files; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"


def test_without_torch_the_error_says_what_to_install() -> None:
    import subprocess
    import sys

    code = "import sys; sys.modules['torch'] = None; import rolltape; rolltape.TokenExporter"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs torch; install rolltape[torch]" in said.stderr


def test_a_url_is_refused() -> None:
    with pytest.raises(RecordError, match="not to a URL"):
        TokenExporter("s3://bucket/run", rank=0, world_size=1)


def test_formats_hold_the_same_records(tmp_path: Path) -> None:
    batch = packed(trained_everywhere(), **FACTS)
    columns = [spelled(record) for record in exported(tmp_path, batch, loss=Dppo())]
    lines = [spelled(record) for record in exported(tmp_path / "lines", batch, loss=Dppo(), file_format=Format.JSONL)]
    for ours, theirs in zip(columns, lines, strict=True):
        differing = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
        assert differing <= {"rewards"} | ({"reward"} if ours["reward"] == "nan" else set()), "of which some are null"
    assert "rewards" in lines[0], "which prime-rl has token by token"
