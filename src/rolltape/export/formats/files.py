"""Samples → files for a framework: JSON lines, arrays in `.npz`, or slime's `.pt`."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import ExportError
from rolltape.export.files import Destination, destination
from rolltape.export.formats import areal, prime_rl, skyrl, slime, tinker, trl, verl
from rolltape.export.formats.arrays import torch_module
from rolltape.export.formats.fitting import Fitting, Form
from rolltape.records.sample import Sample

_encode = msgspec.json.Encoder().encode


class Choices(NamedTuple):
    """Settings of formats. Each format uses those that it knows."""

    versions: tuple[str, ...] = ()
    temperature: prime_rl.Temperatures | None = None  # None: as the turns recorded it
    env_name: str = "rolltape"
    logprobs: bool = True


class Written(NamedTuple):
    """How many samples a file holds, and a sentence for each thing that the format could not carry."""

    samples: int
    left_out: list[str]


class Framework(NamedTuple):
    """How a framework's file is written, and which endings its name may have."""

    endings: tuple[str, ...]
    form: Form
    write: Callable[[Iterable[Sample], IO[bytes], Choices, str], int]


DEFAULTS = Choices()


def write_samples_for(
    framework: str, samples: Iterable[Sample], out: Destination, choices: Choices = DEFAULTS
) -> Written:
    """Write samples in a framework's form. Nothing is written if a sample lacks what the form needs."""
    if framework not in FRAMEWORKS:
        raise ExportError(f"there is no format for {framework!r}; known are {', '.join(FRAMEWORKS)}")
    chosen = FRAMEWORKS[framework]
    fitting = Fitting(chosen.form.carrying(logprobs=choices.logprobs))
    with destination(out) as stream:
        written = chosen.write(fitting.passing(samples), stream, choices, Path(out).suffix)
    return Written(written, fitting.left_out())


def _lines(row: Callable[[Sample, Choices], Mapping[str, Any]]) -> Callable[..., int]:
    """A writer of one JSON line per sample, as samples come."""

    def write(samples: Iterable[Sample], stream: IO[bytes], choices: Choices, ending: str) -> int:
        written = 0
        for sample in samples:
            stream.write(_encode(row(sample, choices)) + b"\n")
            written += 1
        return written

    return write


def _write_slime(samples: Iterable[Sample], stream: IO[bytes], choices: Choices, ending: str) -> int:
    held = list(samples)
    rows = slime.rows(held, logprobs=choices.logprobs)
    if ending == ".pt":
        _save_slime(list(rows), {sample.step for sample in held}, stream)
    else:
        stream.writelines(_encode(slime.plain(row)) + b"\n" for row in rows)
    return len(held)


def _save_slime(rows: list[dict[str, Any]], steps: set[int], stream: IO[bytes]) -> None:
    """What slime's --load-debug-rollout-data reads: the samples of one step."""
    if len(steps) != 1:
        raise ExportError(f"slime's .pt holds one step, but the samples are of {len(steps)}; choose one with --step")
    torch = torch_module()
    for row in rows:
        if "rollout_routed_experts" in row:
            row["rollout_routed_experts"] = torch.from_numpy(row["rollout_routed_experts"])
    torch.save({"rollout_id": steps.pop(), "samples": rows}, stream)


def _write_skyrl(samples: Iterable[Sample], stream: IO[bytes], choices: Choices, ending: str) -> int:
    held = list(samples)
    stream.writelines(_encode(row) + b"\n" for row in skyrl.rows(held, logprobs=choices.logprobs))
    return len(held)


def _write_verl(samples: Iterable[Sample], stream: IO[bytes], choices: Choices, ending: str) -> int:
    held = list(samples)
    tensors = verl.arrays(held, logprobs=choices.logprobs)
    non_tensors = verl.identities(held, choices.versions)
    _save_arrays({**tensors, **{f"non_tensor.{name}": values for name, values in non_tensors.items()}}, stream)
    return len(held)


def _write_areal(samples: Iterable[Sample], stream: IO[bytes], choices: Choices, ending: str) -> int:
    held = list(samples)
    _save_arrays({**areal.arrays(held, choices.versions), **areal.identities(held)}, stream)
    return len(held)


def _save_arrays(arrays: dict[str, npt.NDArray[Any]], stream: IO[bytes]) -> None:
    np.savez_compressed(stream, allow_pickle=False, **arrays)


FRAMEWORKS: dict[str, Framework] = {
    "slime": Framework((".jsonl", ".pt"), slime.FORM, _write_slime),
    "verl": Framework((".npz",), verl.FORM, _write_verl),
    "prime-rl": Framework(
        (".jsonl",),
        prime_rl.FORM,
        _lines(lambda sample, choices: prime_rl.row(sample, choices.env_name, choices.temperature)),
    ),
    "areal": Framework((".npz",), areal.FORM, _write_areal),
    "trl": Framework((".jsonl",), trl.FORM, _lines(lambda sample, _: trl.row(sample))),
    "tinker": Framework((".jsonl",), tinker.FORM, _lines(lambda sample, _: tinker.row(sample))),
    "skyrl": Framework((".jsonl",), skyrl.FORM, _write_skyrl),
}
