"""A trainer in numpy: the clipped policy gradient of GRPO, only for a model's output layer.

The layers below do not change, so no gradient flows through them, and their states of a sample are computed once.
The trainer computes with weights in bfloat16, like most trainers, and the engine in float32. Their logprobs differ
slightly; the token records show where.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.records.sample import Sample
from rolltape.records.token_record import TokenRecord
from rolltape.tape.rundir import write_whole
from rolltape.tiny import shipped_model
from rolltape.tiny.attention import Cache, TokenSpan
from rolltape.tiny.checkpoint import Floats, read_tensors
from rolltape.tiny.model import Qwen3
from rolltape.tokens import score_sample

_EMBEDDING, _OUTPUT_LAYER = "model.embed_tokens.weight", "lm_head.weight"
_UPDATES = 2  # of the weights per step
_LEARNING_RATE = 3e-3
_DECAYS = (0.9, 0.999)  # of Adam's two averages
_CLIP_LOW, _CLIP_HIGH = 0.2, 0.28
_FORWARD_TOKENS = 2048


class _TrainedTokens(NamedTuple):
    """The trained tokens of many samples, end to end."""

    states: Floats  # (tokens, hidden): the inputs of the output layer that predict them
    ids: npt.NDArray[np.int64]
    inference_logprobs: Floats
    pulls: Floats  # advantage × share of the loss


class OutputLayerTrainer:
    """The weights of the shipped model, of which `update` changes the output layer."""

    def __init__(self) -> None:
        self._tensors = dict(read_tensors(shipped_model()))
        self._tensors[_OUTPUT_LAYER] = self._tensors[_EMBEDDING].copy()
        self._mean = np.zeros_like(self._tensors[_OUTPUT_LAYER])
        self._square = np.zeros_like(self._mean)
        self._updates = 0
        with tempfile.TemporaryDirectory() as folder:
            rounded = {name: round_to_bfloat16(values) for name, values in self._tensors.items()}
            _write_checkpoint(Path(folder) / "bfloat16", rounded)
            self._below = Qwen3(Path(folder) / "bfloat16")

    def save(self, folder: Path) -> None:
        """Write the weights for the engine."""
        _write_checkpoint(folder, self._tensors)

    def update(self, samples: Sequence[Sample]) -> list[TokenRecord]:
        """Update the weights by samples at temperature 1. Return a record for each sample, as before the update."""
        trained = self._trained_tokens(samples)
        before: Floats | None = None
        for _ in range(_UPDATES):
            probabilities = self._probabilities(trained.states)
            logprobs: Floats = np.log(probabilities[np.arange(len(trained.ids)), trained.ids])
            before = logprobs if before is None else before
            ratio = np.exp(logprobs - trained.inference_logprobs)
            too_far = np.where(trained.pulls > 0, ratio > 1 + _CLIP_HIGH, ratio < 1 - _CLIP_LOW)
            by_logit = -probabilities
            by_logit[np.arange(len(trained.ids)), trained.ids] += 1
            by_logit *= np.where(too_far, 0, trained.pulls * ratio)[:, None]
            self._step(-by_logit.T @ trained.states)
        assert before is not None
        return _records(samples, before)

    def _trained_tokens(self, samples: Sequence[Sample]) -> _TrainedTokens:
        rollouts = len({sample.rollout for sample in samples})
        places = [np.flatnonzero(sample.trained_mask) for sample in samples]
        pulls = [
            np.full(len(at), (sample.advantage or 0.0) * sample.loss_weight / len(at) / rollouts, np.float32)
            for sample, at in zip(samples, places, strict=True)
        ]
        states = self._states(samples)
        return _TrainedTokens(
            # A token is predicted from the state of the one before it.
            np.concatenate([rows[at - 1] for rows, at in zip(states, places, strict=True)]),
            np.concatenate([sample.ids[at] for sample, at in zip(samples, places, strict=True)]),
            np.concatenate([sample.logprobs[at] for sample, at in zip(samples, places, strict=True)]),
            np.concatenate(pulls),
        )

    def _states(self, samples: Sequence[Sample]) -> list[Floats]:
        """The states of each sample's tokens below the output layer."""
        states: list[Floats] = []
        spans: list[TokenSpan] = []
        for number, sample in enumerate(samples, 1):
            ids = sample.ids.tolist()
            spans.append(TokenSpan(Cache(self._below.config, len(ids)), ids, 0, len(ids)))
            if sum(map(len, (span.ids for span in spans))) > _FORWARD_TOKENS or number == len(samples):
                ends = np.cumsum([len(span.ids) for span in spans])
                states += np.split(self._below.final_states(spans), ends[:-1])
                spans = []
        return states

    def _probabilities(self, states: Floats) -> Floats:
        logits: Floats = states @ round_to_bfloat16(self._tensors[_OUTPUT_LAYER]).T
        logits -= logits.max(axis=1, keepdims=True)
        np.exp(logits, out=logits)
        logits /= logits.sum(axis=1, keepdims=True)
        return logits

    def _step(self, gradient: Floats) -> None:
        """One step of Adam."""
        self._updates += 1
        for average, value, decay in ((self._mean, gradient, _DECAYS[0]), (self._square, gradient**2, _DECAYS[1])):
            average *= decay
            average += (1 - decay) * value
        mean, square = (
            average / (1 - decay**self._updates)
            for average, decay in zip((self._mean, self._square), _DECAYS, strict=True)
        )
        self._tensors[_OUTPUT_LAYER] -= _LEARNING_RATE * mean / (np.sqrt(square) + 1e-8)


def _records(samples: Sequence[Sample], logprobs: Floats) -> list[TokenRecord]:
    """Token records of samples, given the trainer's logprobs of all their trained tokens."""
    records, start = [], 0
    for number, sample in enumerate(samples):
        every = np.full(len(sample.ids), np.nan, np.float32)
        stop = start + int(sample.trained_mask.sum())
        every[sample.trained_mask] = logprobs[start:stop]
        records.append(msgspec.structs.replace(score_sample(sample, every), micro_sequence=number))
        start = stop
    return records


def round_to_bfloat16(values: Floats) -> Floats:
    """Round to the nearest bfloat16, with ties to even."""
    bits = values.view(np.uint32)
    rounded: Floats = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return rounded


def _write_checkpoint(folder: Path, tensors: Mapping[str, Floats]) -> None:
    """Write a checkpoint in float32 with the shape of the shipped one, and with an untied output layer."""
    shipped = shipped_model()
    if not folder.exists():
        folder.mkdir(parents=True)
        for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(shipped / file, folder)
        config = json.loads((shipped / "config.json").read_text())
        config |= {"tie_word_embeddings": _OUTPUT_LAYER not in tensors, "torch_dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    header, end = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": (end, end + values.nbytes)}
        end += values.nbytes
    named = json.dumps(header).encode()
    content = [len(named).to_bytes(8, "little"), named, *(values.tobytes() for values in tensors.values())]
    write_whole(folder / "model.safetensors", b"".join(content))
