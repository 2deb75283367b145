"""Token export from CUDA tensors gives the records that it gives from CPU ones. Without a GPU it checks nothing.

python tests/tokens/check_on_gpu.py
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from rolltape.records.token_record import TOKEN_COLUMNS, TokenRecord
from rolltape.tokens import Dppo, Ipo, LossSpec, OnPolicyDistillation, PpoClip, TokenExporter, read_tokens, snapshot
from token_batches import exported, packed, padded, sequence_columns

LOSSES: list[LossSpec] = [Dppo(), Ipo(), OnPolicyDistillation(), PpoClip(clip_high=0.28)]


def moved(given: dict[str, Any], *but: str) -> dict[str, Any]:
    return {
        name: value.cuda() if isinstance(value, torch.Tensor) and name not in but else value
        for name, value in given.items()
    }


def check_same(expected: list[TokenRecord], found: list[TokenRecord], what: str) -> None:
    assert len(expected) == len(found) > 0, what
    for ours, theirs in zip(expected, found, strict=True):
        assert set(ours.columns()) == set(theirs.columns()), what
        assert (ours.sample, ours.reward) == (theirs.sample, theirs.reward), what
        for name, values in ours.columns().items():
            other = theirs.columns()[name]
            if TOKEN_COLUMNS[name].dtype is np.bool_:
                # The two devices may round a value at a threshold to either side of it.
                assert (values != other).mean() < 1e-3, f"{what}: {name}"
            else:
                assert np.allclose(values, other, rtol=1e-5, atol=1e-6, equal_nan=True), f"{what}: {name}"
    print(f"{what}: {len(found)} records agree")


def main() -> None:
    sequences = [sequence_columns(length, seed=length) for length in (700, 3, 5000, 64)]
    flat = packed(sequences, sample_ids=["a", "b", "c", "d"], rewards=[0.1, 0.2, 0.3, 0.4])
    bounds = torch.tensor([0, 700, 703, 5703, 5767], dtype=torch.int32)
    by_bounds = ({**flat[0], "lengths": None, "cu_seqlens": bounds}, flat[1])
    rows = padded(sequences, left=True, sample_ids=["a", "b", "c", "d"], rewards=torch.tensor([0.1, 0.2, 0.3, 0.4]))
    each = ({**by_bounds[0], "advantages": torch.tensor([1.0, -1.0, 0.5, 0.0])}, flat[1])
    right, right_outputs = padded(sequences, rewards=[1, 2, 3, 4])
    by_length = ({**right, "attention_mask": None, "lengths": torch.tensor([700, 3, 5000, 64])}, right_outputs)
    half = tuple({n: v.bfloat16() if n.endswith("logprobs") else v for n, v in part.items()} for part in flat)
    with tempfile.TemporaryDirectory() as folder:
        number = 0
        for loss in LOSSES:
            for name, (given, outputs) in {
                "lengths": flat, "bounds": by_bounds, "rows": rows, "rows by length": by_length,
                "an advantage each": each, "half": half
            }.items():  # fmt: skip
                own = (loss.weights, *(key for key in given if not key.endswith("_weights")))
                batch = {key: given[key] for key in own if key in given}
                expected = exported(Path(folder) / f"{number}", (batch, outputs), loss=loss)
                both = exported(Path(folder) / f"{number}.gpu", (moved(batch), moved(outputs)), loss=loss)
                check_same(expected, both, f"{type(loss).__name__}, {name}")
                mixed = exported(Path(folder) / f"{number}.mixed", (batch, moved(outputs)), loss=loss)
                check_same(expected, mixed, f"{type(loss).__name__}, {name}, batch on the CPU")
                number += 1
        _check_mixed(Path(folder) / "mixed", flat)
        _check_without_streams(Path(folder) / "plain", flat)
        _check_positions(Path(folder) / "positions", flat)
        _check_old_alone(Path(folder) / "old", flat)
        _check_default_device(Path(folder) / "default", each)
        _check_snapshots(Path(folder) / "snapshots")
        _check_bad_lengths(Path(folder) / "lengths")


def _check_mixed(run: Path, given: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Weights choose the losses of each token, and weights without what their loss reads must be zero."""
    batch, outputs = given
    tokens = len(batch["input_ids"])
    random = torch.Generator().manual_seed(1)
    weights = {
        name: torch.rand(tokens, generator=random) * (torch.rand(tokens, generator=random) < 0.4)
        for name in ("rl_weights", "ref_kl_weights", "ce_weights")
    }
    for dtype in (torch.float32, torch.bfloat16):
        mixed = {**batch, **weights}, {**outputs, "logprobs": outputs["logprobs"].to(dtype)}
        for loss in (Dppo(), Ipo(), PpoClip()):
            name = f"{type(loss).__name__}.{dtype}"
            expected = exported(run / name, mixed, loss=loss)
            found = exported(run / f"{name}.gpu", (moved(mixed[0]), moved(mixed[1])), loss=loss)
            check_same(expected, found, f"three losses, {loss}, {dtype}")
    lacking = moved({**batch, **weights, "reference_logprobs": None})
    with TokenExporter(run / "lacking", rank=0, world_size=1, loss=Dppo()) as exporter:
        exporter.export(0, 0, lacking, moved(outputs))
    assert "the batch has no reference_logprobs" in exporter.report().problems[0], exporter.report()
    print("weights without logprobs of the reference: refused")


def _check_without_streams(run: Path, given: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """The way of accelerators that cannot copy behind the caller."""
    expected = exported(run / "cpu", given, loss=Dppo())
    kept, snapshot.has_streams = snapshot.has_streams, lambda device: False
    try:
        found = exported(run / "gpu", (moved(given[0]), moved(given[1])), loss=Dppo())
    finally:
        snapshot.has_streams = kept
    check_same(expected, found, "without streams")


def _check_positions(run: Path, given: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """A packed batch without lengths is found behind the training thread by its positions, and nothing is written."""
    batch, outputs = ({**given[0], "lengths": None, "sample_ids": None, "rewards": None}, given[1])
    with TokenExporter(run, rank=0, world_size=1) as exporter:
        exporter.export(0, 0, moved(batch), moved(outputs))
    assert "first at token 700, so it is several sequences" in exporter.report().problems[0], exporter.report()
    print("packed without lengths: refused")


def _check_old_alone(run: Path, given: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """A clipped loss masks by the old policy's logprobs, if there are no others."""
    batch, outputs = {**given[0], "inference_logprobs": None, "ref_kl_weights": None}, given[1]
    expected = exported(run / "cpu", (batch, outputs), loss=PpoClip())
    check_same(expected, exported(run / "gpu", (moved(batch), moved(outputs)), loss=PpoClip()), "old logprobs alone")


def _check_default_device(run: Path, given: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Lists stay on the host, and so does what is copied there, wherever torch makes its tensors."""
    batch, outputs = given
    facts = {"rewards": [0.1, None, 0.3, 0.4], "weight_versions": torch.tensor([7, 7, 8, 8])}
    expected = exported(run / "cpu", ({**batch, **facts}, outputs), loss=Dppo())
    there = (moved({**batch, **facts}, "cu_seqlens"), moved(outputs))
    torch.set_default_device("cuda")
    found = exported(run / "gpu", there, loss=Dppo())
    torch.set_default_device(None)
    check_same(expected, found, "default device")
    assert (
        [record.versions for record in expected] == [record.versions for record in found] == [("7",)] * 2 + [("8",)] * 2
    )


def _check_snapshots(run: Path) -> None:
    """What is overwritten at once, and freed, is exported as it was."""
    with TokenExporter(run, rank=0, world_size=1) as exporter:
        for step in range(40):
            values = torch.full((1 << 18,), float(step), device="cuda")
            ids = torch.full((1 << 18,), step, device="cuda")
            batch = {"input_ids": ids, "trained_mask": torch.ones(1 << 18, device="cuda"), "lengths": [1 << 17] * 2}
            exporter.export(step, 0, batch, {"logprobs": values})
            values.fill_(-1)
            ids.fill_(-1)
            del values, ids, batch
            exporter.mark_stable(step)
    assert exporter.report().complete, exporter.report()
    for record in read_tokens(run):
        assert (record.trainer_logprobs == record.step).all()
        assert (record.ids == record.step).all()
    print("snapshots: 40 steps as they were")


def _check_bad_lengths(run: Path) -> None:
    """Lengths on the device that do not add up are found behind the training thread, and nothing is written."""
    with TokenExporter(run, rank=0, world_size=1, loss=Dppo()) as exporter:
        batch, outputs = (moved(part) for part in packed([sequence_columns(10)]))
        batch["advantages"] = torch.ones(2, device="cuda")
        exporter.export(0, 0, {**batch, "lengths": torch.tensor([9, 4], device="cuda")}, outputs)
    assert "add up to 13 tokens, but the columns have 10" in exporter.report().problems[0], exporter.report()
    print("lengths: refused")


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("no GPU here, or a torch without CUDA: nothing is checked")
