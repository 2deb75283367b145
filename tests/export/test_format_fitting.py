"""What a format needs and is not there is refused by name; what it cannot carry is said."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from exported import a_sample
from rolltape.errors import ExportError
from rolltape.export.formats import FRAMEWORKS, Choices, LeftOutWarning, datums, tensor_dict, write_samples_for
from rolltape.export.formats.fitting import Fitting, Need
from rolltape.records.sample import Fate, Origin, Sample, Span
from rolltape.records.turn import LogprobKind


def fit(**changes: Any) -> Sample:
    """A sample that every format takes whole."""
    plain: dict[str, Any] = {
        "reward": 1.0,
        "advantage": 0.5,
        "side": {},
        "turn_rewards": {},
        "version_index": np.array([-1, -1, 0, 0], np.int32),
        "logprob_kind": LogprobKind.AFTER_TEMPERATURE,
    }
    return a_sample(**(plain | changes))


def path_for(framework: str, folder: Path) -> Path:
    return folder / f"out{FRAMEWORKS[framework].endings[0]}"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nothing_is_said_of_a_sample_that_is_carried_whole(framework: str, tmp_path: Path) -> None:
    assert write_samples_for(framework, [fit()], path_for(framework, tmp_path)) == (1, [])


@pytest.mark.parametrize("framework", [name for name, one in FRAMEWORKS.items() if Need.LOGPROBS in one.form.needs])
@pytest.mark.parametrize("missing", [np.nan, -np.inf])
def test_samples_without_logprobs_are_counted_and_the_first_is_named(
    framework: str, missing: float, tmp_path: Path
) -> None:
    lacking = np.array([np.nan, np.nan, missing, -1.0], np.float32)
    samples = [fit(id="whole"), fit(id="one", logprobs=lacking), fit(id="two", logprobs=lacking)]
    with pytest.raises(ExportError) as refused:
        write_samples_for(framework, samples, path_for(framework, tmp_path))
    assert str(refused.value) == (
        f"{framework} needs a logprob for each trained token, but 2 of 3 samples have none, one first; choose a policy "
        "that masks such tokens, as exact does, or leave logprobs out where the format can"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("framework", "lacks", "need"),
    [
        ("slime", {"reward": None}, "a reward"),
        ("verl", {"reward": float("nan")}, "a reward"),
        ("areal", {"reward": None}, "a reward"),
        ("prime-rl", {"advantage": None}, "an advantage"),
        ("tinker", {"advantage": None}, "an advantage"),
    ],
)
def test_what_a_loss_is_computed_from_must_be_there(
    framework: str, lacks: dict[str, Any], need: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=rf"{framework} needs {need}, but 1 of 1 samples have none, .*score their"):
        write_samples_for(framework, [fit(**lacks)], path_for(framework, tmp_path))


def test_all_that_is_lacking_is_said_at_once() -> None:
    lacking = fit(advantage=None, logprobs=np.full(4, np.nan, np.float32))
    with pytest.raises(ExportError, match=r"needs a logprob .*; tinker needs an advantage"):
        datums([lacking])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("holds", "said", "carried_by"),
    [
        ({"siblings": 2}, "of rollouts that forked", {"slime"}),
        ({"turn_rewards": {"t": 1.0}}, "with rewards of single turns", set()),
        ({"logprob_kind": LogprobKind.AFTER_TRUNCATION}, "whose logprobs are after truncation, as by top-p", set()),
        ({"side": a_sample().side}, "with side arrays (experts, kept)", set()),
        (
            {"trained_mask": np.array([0, 0, 1, 1], bool), "version_index": np.array([-1, -1, 0, 1], np.int32),
             "versions": (("7", "7"), ("8", "8")), "logprobs": np.array([0, 0, -1, -1], np.float32)},
            "sampled by several weight versions", {"areal"},
        ),
        (
            {"version_index": np.array([-1, -1, 1, 1], np.int32)},
            "with tokens whose weight version is only known to lie between two", set(),
        ),
    ],
    ids=["forked", "turn rewards", "truncated logprobs", "side arrays", "versions", "unsure version"],
)  # fmt: skip
def test_each_format_says_what_it_cannot_carry(
    framework: str, holds: dict[str, Any], said: str, carried_by: set[str], tmp_path: Path
) -> None:
    written = write_samples_for(framework, [fit(), fit(**holds)], path_for(framework, tmp_path))
    expected = [] if framework in carried_by else [f"{framework}: 1 of 2 samples {said}"]
    assert [sentence.rpartition(": ")[0] for sentence in written.left_out] == expected


def mixed(**second: Any) -> Sample:
    """Three trained tokens: one of a first turn, two of a second one."""
    first = Span(1, 2, Origin.SAMPLED, "r.0.0.0", 0, (1, 2), Fate.TRAINED, 1.0, LogprobKind.AFTER_TEMPERATURE)
    later = Span(2, 4, Origin.SAMPLED, "r.0.0.1", 0, (3, 4), Fate.TRAINED, 1.0, LogprobKind.AFTER_TEMPERATURE)
    return fit(
        trained_mask=np.array([False, True, True, True]),
        trained_tokens=3,
        prompt_tokens=1,
        logprobs=np.array([np.nan, -1, -2, -3], np.float32),
        spans=(Span(0, 1, Origin.PROMPT, "r.0.0.0", 0, (0, 1), None), first, msgspec.structs.replace(later, **second)),
    )


@pytest.mark.parametrize(
    ("second", "report"),
    [
        ({"temperature": 0.5}, "sampled at several temperatures"),
        ({"logprob_kind": LogprobKind.RAW}, "with logprobs of several kinds"),
    ],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_differs_from_most_of_a_sample_is_masked_where_a_format_has_one_value(
    framework: str, second: dict[str, Any], report: str, tmp_path: Path
) -> None:
    fitting = Fitting(FRAMEWORKS[framework].form)
    (passed,) = fitting.passing([mixed(**second)])
    if framework == "prime-rl":  # has a temperature for each token
        assert (passed.trained_mask.tolist(), fitting.left_out()) == ([False, True, True, True], [])
        return
    assert passed.trained_mask.tolist() == [False, False, True, True]
    assert passed.trained_tokens == 2
    (sentence,) = fitting.left_out()
    assert sentence.startswith(f"{framework}: 1 of 1 samples {report}: tokens unlike most of their sample are masked")


def test_a_temperature_that_nobody_recorded_is_unlike_no_other() -> None:
    fitting = Fitting(FRAMEWORKS["tinker"].form)
    (passed,) = fitting.passing([mixed(temperature=None)])
    assert passed.trained_mask.tolist() == [False, True, True, True]
    assert fitting.left_out() == []


def test_logprobs_after_truncation_are_reported_also_where_a_sample_mixes_kinds() -> None:
    fitting = Fitting(FRAMEWORKS["prime-rl"].form)
    list(fitting.passing([mixed(logprob_kind=LogprobKind.AFTER_TRUNCATION)]))
    (report,) = fitting.left_out()
    assert "whose logprobs are after truncation" in report


def test_logprob_kinds_do_not_matter_where_logprobs_are_left_out(tmp_path: Path) -> None:
    sample = mixed(logprob_kind=LogprobKind.RAW)
    choices = Choices(logprobs=False)
    assert write_samples_for("verl", [sample], tmp_path / "x.npz", choices) == (1, [])
    assert np.load(tmp_path / "x.npz")["response_mask"].sum() == 3


def test_a_training_loop_is_warned_once_and_not_at_every_step() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for step in range(3):
            datums([fit(siblings=2)] * (step + 1))
    (warning,) = caught
    assert warning.category is LeftOutWarning
    assert warning.filename == __file__
    assert str(warning.message).startswith("tinker: samples of rollouts that forked: loss_weight is not carried; ")


@pytest.mark.parametrize("framework", [name for name, one in FRAMEWORKS.items() if ".npz" in one.endings])
def test_a_batch_of_no_samples_is_refused(framework: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no samples"):
        write_samples_for(framework, [], path_for(framework, tmp_path))


@pytest.mark.parametrize("framework", [name for name, one in FRAMEWORKS.items() if ".jsonl" in one.endings])
def test_no_samples_make_no_lines(framework: str, tmp_path: Path) -> None:
    assert write_samples_for(framework, [], tmp_path / "none.jsonl") == (0, [])
    assert (tmp_path / "none.jsonl").read_bytes() == b""


def test_an_unknown_framework_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match="no format for 'nemo'; known are slime, verl, prime-rl, areal, trl, tinker, skyrl"
    ):
        write_samples_for("nemo", [], tmp_path / "x")


def test_without_torch_a_tensor_format_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        ExportError, match=r"^this format needs torch, which is not installed; pip install 'rolltape\[torch\]'"
    ):
        tensor_dict([fit()])


def test_files_are_written_without_torch(tmp_path: Path) -> None:
    code = """
import sys
from exported import a_sample
from rolltape.export.formats import FRAMEWORKS, write_samples_for
for framework, form in FRAMEWORKS.items():
    plain = {"reward": 1.0, "advantage": 0.5, "logprob_kind": None}
    write_samples_for(framework, [a_sample(**plain)], f"{sys.argv[1]}/{framework}{form.endings[0]}")
assert not {"torch", "verl", "trl", "tinker"} & sys.modules.keys()
"""
    folder = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        check=True,
        env={**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert len(list(tmp_path.iterdir())) == len(FRAMEWORKS)
