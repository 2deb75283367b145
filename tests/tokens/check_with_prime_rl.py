"""Token export beside prime-rl's own code: its packer, its data loader, its losses and its exporter.

prime-rl is on no package index. Run this by the Python of an environment in which a checkout of it can be imported on a
CPU, with the checkout and this repository in the path; docs/how-to/train/prime-rl.md says how:

PYTHONPATH=src:$PRIME_RL/src:$PRIME_RL/packages/prime-rl-configs/src python tests/tokens/check_with_prime_rl.py
"""

import json
import random
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from prime_rl.configs.trainer import DefaultLossConfig, IPOLossConfig
from prime_rl.trainer.batch import build_bin_cost, prepare_batch
from prime_rl.trainer.rl.data import DataLoader
from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn
from prime_rl.trainer.rl.token_export import TokenExporter as TheirExporter
from prime_rl.transports.rollouts import TrainingSample

sys.path.insert(0, str(Path(__file__).parents[1]))

from rolltape.tokens import Dppo, Format, Ipo, LossSpec, TokenExporter, read_tokens

STREAMS = ("rl_weights", "ce_weights", "ref_kl_weights")
REFERENCE_KL = 1e-3  # how much prime-rl's distillation holds on to the policy that sampled
LOSSES: list[tuple[Any, LossSpec]] = [
    (DefaultLossConfig(kl_tau=0.0), Dppo()),
    (DefaultLossConfig(kl_tau=0.0, dppo_mask_low=0.05, dppo_mask_high=0.3), Dppo(mask_low=0.05, mask_high=0.3)),
    (IPOLossConfig(kl_tau=0.0), Ipo()),
]


def training_sample(number: int, weights: tuple[str, ...]) -> TrainingSample:
    """A sequence with a prompt, whose reply trains with the losses named, with one of them per token."""
    choose = random.Random(number)
    length, prompt = choose.randint(20, 200), choose.randint(3, 15)
    mask = [at >= prompt for at in range(length)]
    chosen = [choose.choice(weights) if weights else "" for _ in range(length)]
    streams = {
        name: [choose.random() if own == name and trained else 0.0 for own, trained in zip(chosen, mask, strict=True)]
        for name in (STREAMS if weights else ())
    }
    return TrainingSample(
        token_ids=[choose.randrange(1000) for _ in range(length)],
        mask=mask,
        logprobs=[-choose.expovariate(1.0) if trained else 0.0 for trained in mask],
        temperatures=[1.0] * length,
        env_name=f"env-{number % 2}",
        advantages=[choose.choice((-1.0, 0.0, 0.5)) if trained else 0.0 for trained in mask],
        ref_logprobs=[-choose.expovariate(1.0) for _ in range(length)] if "ref_kl_weights" in weights else None,
        **streams,
    )


def micro_batches(samples: list[TrainingSample]) -> list[dict[str, Any]]:
    """As prime-rl's trainer has them: packed, padded, turned to tensors."""
    (rank,) = prepare_batch(samples, 1024, 1, build_bin_cost(None), pad_to_multiple_of=64)
    to_tensors = DataLoader._micro_batch_to_tensor
    return [to_tensors(SimpleNamespace(), micro_batch) for micro_batch in rank]


def gradient(batch: dict[str, Any], trainer: torch.Tensor, config: Any) -> torch.Tensor:
    """Of prime-rl's loss without what holds on to the policy that sampled, in double precision."""
    lengths = batch["sequence_lengths"]
    logprobs = trainer.double().clone().requires_grad_()
    split = {
        name: None if batch[name] is None else batch[name].squeeze(0).split(lengths)
        for name in ("inference_logprobs", "ref_logprobs", "advantages", "loss_mask", *STREAMS)
    }
    loss, _ = compute_loss(
        trainer_logprobs=torch.split(logprobs, lengths),
        **split,
        rl_loss_fn=setup_rl_loss_fn(config),
        rl_scale=1,
        ce_scale=1,
        ref_kl_scale=1,
    )
    if batch["ref_kl_weights"] is not None:
        apart = (logprobs - batch["inference_logprobs"].squeeze(0)) ** 2
        loss = loss - (REFERENCE_KL * batch["ref_kl_weights"].squeeze(0) * apart).sum()
    (found,) = torch.autograd.grad(loss, logprobs)
    return found


def check_masks(run: Path, samples: list[TrainingSample], config: Any, loss: LossSpec, what: str) -> None:
    noise = torch.Generator().manual_seed(0)
    batches = micro_batches(samples)
    shown: list[torch.Tensor] = []
    with TokenExporter(run, rank=0, world_size=1, loss=loss) as exporter:
        for micro_step, batch in enumerate(batches):
            inference = batch["inference_logprobs"].squeeze(0)
            trainer = (inference + torch.randn(len(inference), generator=noise)).clamp(max=-1e-3)
            exporter.export(0, micro_step, batch, {"logprobs": trainer[None], "entropy": trainer.exp()[None]})
            shown += torch.split(gradient(batch, trainer, config).abs() < 1e-9, batch["sequence_lengths"])
        exporter.mark_stable(0)
    assert exporter.report().complete, exporter.report()
    packed = [len(batch["sequence_lengths"]) for batch in batches]
    records = list(read_tokens(run))
    assert len(records) == len(samples), (len(records), len(samples))
    trained = masked = 0
    for record, zero in zip(records, shown, strict=True):
        expected = zero[: len(record)].numpy() & record.trained_mask
        assert record.masked is not None
        wrong = (record.masked != expected).nonzero()[0]
        assert not len(wrong), f"{what}, record {record.place}, tokens {wrong}"
        trained, masked = trained + record.trained_tokens, masked + int(record.masked.sum())
    assert 0 < masked < trained, what
    print(f"{what}: {sum(packed)} sequences, {len(batches)} micro-batches, {masked} of {trained} tokens masked by both")


def check_lines(run: Path, samples: list[TrainingSample], config: Any, loss: LossSpec) -> None:
    """What both exporters write of the same micro-batches."""
    noise = torch.Generator().manual_seed(0)
    theirs = TheirExporter(run / "theirs", 0)
    with TokenExporter(run / "ours", rank=0, world_size=1, loss=loss, file_format=Format.JSONL) as ours:
        for micro_step, batch in enumerate(micro_batches(samples)):
            inference = batch["inference_logprobs"]
            trainer = (inference + 0.3 * torch.randn(inference.shape, generator=noise)).clamp(max=-1e-3)
            outputs = {"logprobs": trainer, "entropy": trainer.exp()}
            theirs.export(0, micro_step, batch, outputs, batch["sequence_lengths"], config)
            ours.export(0, micro_step, batch, outputs)
        ours.mark_stable(0)
    pairs = [
        [json.loads(line) for line in (run / who / "token_exports" / "step_0" / "rank_0.jsonl").open()]
        for who in ("theirs", "ours")
    ]
    for their_line, our_line in zip(*pairs, strict=True):
        for name, values in their_line.items():
            if name == "is_masked":  # ours also counts a token without an advantage
                assert all(own or not other for own, other in zip(our_line[name], values, strict=True))
            elif isinstance(values, list) and isinstance(values[0], float):
                assert torch.allclose(torch.tensor(our_line[name]), torch.tensor(values), atol=1e-6), name
            else:
                assert our_line[name] == values, name
    print(f"lines: {len(pairs[0])} records of {len(their_line)} fields agree")


def main() -> None:
    plain = [training_sample(number, ()) for number in range(12)]
    mixed = [training_sample(number, STREAMS if number % 3 else ()) for number in range(12)]
    with tempfile.TemporaryDirectory() as folder:
        for number, (config, loss) in enumerate(LOSSES):
            check_masks(Path(folder) / f"{number}.plain", plain, config, loss, f"{loss}")
            check_masks(
                Path(folder) / f"{number}.mixed", mixed, config, loss, f"{loss} with distillation and cross-entropy"
            )
        check_lines(Path(folder) / "lines", plain, *LOSSES[0])


if __name__ == "__main__":
    main()
