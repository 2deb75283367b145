"""What Rolltape uses of prime-rl, as the smallest modules with its names and checks. prime-rl is on no package index.

Where a checkout of prime-rl 0.8 can be imported, tests use that instead: docs/how-to/train/prime-rl.md says how.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest


class FileSystemTransportConfig(msgspec.Struct):
    type: str = "filesystem"


class RoutedExperts(msgspec.Struct, array_like=True):
    data: bytes
    shape: list[int]
    dtype: str


class TrainingSample(msgspec.Struct, array_like=True):
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    routed_experts: RoutedExperts | None = None
    advantages: list[float] | None = None


class MicroBatch(msgspec.Struct, array_like=True, kw_only=True):
    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]


def build_bin_cost(model_config: Any) -> Any:
    return sum


def prepare_batch(
    rollouts: list[TrainingSample], seq_len: int, num_train_workers: int, bin_cost: Any, pad_to_multiple_of: int = 1
) -> list[list[MicroBatch]]:
    """A micro-batch for each sample, dealt out to the ranks; the last ranks get one without a trained token."""
    made = [_micro_batch(sample) for sample in rollouts]
    while len(made) % num_train_workers:
        made.append(msgspec.structs.replace(made[0], loss_mask=[False] * len(made[0].input_ids)))
    return [made[rank::num_train_workers] for rank in range(num_train_workers)]


def _micro_batch(sample: TrainingSample) -> MicroBatch:
    assert sample.advantages is not None
    return MicroBatch(
        input_ids=sample.token_ids,
        loss_mask=sample.mask,
        advantages=sample.advantages,
        inference_logprobs=sample.logprobs,
        sequence_lengths=[len(sample.token_ids)],
        temperatures=sample.temperatures,
        env_names=[sample.env_name] * len(sample.token_ids),
    )


class _Sender:
    def __init__(self, output_dir: Path, data_world_size: int, current_step: int) -> None:
        self.output_dir, self.data_world_size, self.current_step = output_dir, data_world_size, current_step

    async def send(self, grid: list[list[MicroBatch]]) -> None:
        assert len(grid) == self.data_world_size
        folder = self.output_dir / "rollouts" / f"step_{self.current_step}"
        folder.mkdir(parents=True, exist_ok=True)
        for rank, micro_batches in enumerate(grid):
            (folder / f"rank_{rank}.bin").write_bytes(msgspec.msgpack.encode(micro_batches))
        self.current_step += 1

    def close(self) -> None:
        pass


class _Receiver:
    def __init__(self, output_dir: Path, data_rank: int, current_step: int) -> None:
        self.path = output_dir / "rollouts" / f"step_{current_step}" / f"rank_{data_rank}.bin"

    def receive(self) -> list[MicroBatch]:
        return msgspec.msgpack.decode(self.path.read_bytes(), type=list[MicroBatch])


def setup_micro_batch_sender(output_dir: Path, data_world_size: int, current_step: int, transport: Any) -> _Sender:
    assert transport.type == "filesystem"
    return _Sender(output_dir, data_world_size, current_step)


def setup_micro_batch_receiver(output_dir: Path, data_rank: int, current_step: int, transport: Any) -> _Receiver:
    return _Receiver(output_dir, data_rank, current_step)


_MODULES = {
    "prime_rl.configs.shared": ["FileSystemTransportConfig"],
    "prime_rl.trainer.batch": ["build_bin_cost", "prepare_batch"],
    "prime_rl.transports.rollouts": [
        "RoutedExperts",
        "TrainingSample",
        "setup_micro_batch_receiver",
        "setup_micro_batch_sender",
    ],
}


def use_prime_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `import prime_rl…` find prime-rl itself where it can be imported, else what is above."""
    if importlib.util.find_spec("prime_rl") is not None:
        return
    for name, attributes in _MODULES.items():
        module = ModuleType(name)
        vars(module).update({attribute: globals()[attribute] for attribute in attributes})
        monkeypatch.setitem(sys.modules, name, module)
        for parent in (name.rpartition(".")[0], "prime_rl"):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
