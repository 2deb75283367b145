"""Train the model on the synthetic mixture.

python -m training.train --out FIRST                                      on a GPU
python -m training.train --out FOLDER --recipe second --start FIRST       seconds on a GPU, the shipped model
python -m training.train --out FOLDER --short                             minutes on a CPU, no skill to speak of
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from training.dialogue import Voice
from training.manner import FALLIBLE, STEADY, Manner
from training.model import Attention, Shape, TinyQwen3, load_checkpoint, save_checkpoint
from training.packing import Batch, Packing, batches

TOKENIZER = Path(__file__).parent.parent / "src/rolltape/tiny/models/tiny"
# Rows up to this length attend with a plain mask, which needs no compiling.
LONGEST_DENSE = 2048
# The loss weight of each voice. What others say is learned a little: it teaches the words that replies need.
# The template's empty thinking must not be, or the model would skip thinking when it is on.
WEIGHTS = {Voice.TEMPLATE: 0.0, Voice.OTHERS: 0.05, Voice.MODEL: 1.0}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the outcome of a run; the rate falls towards nothing at `schedule_steps`."""

    seed: int
    steps: int
    schedule_steps: int
    peak_rate: float
    warmup_steps: int
    manner: Manner = STEADY
    rows: int = 8
    length: int = 16384
    weight_decay: float = 0.1


RECIPES = {
    "first": Recipe(seed=20261115, steps=7000, schedule_steps=9000, peak_rate=3e-3, warmup_steps=200),
    "second": Recipe(
        seed=20261116,
        steps=450,
        schedule_steps=450,
        peak_rate=6e-4,
        warmup_steps=10,
        manner=FALLIBLE,
        length=1536,
    ),
    "short": Recipe(seed=20261117, steps=150, schedule_steps=150, peak_rate=3e-3, warmup_steps=20, rows=4, length=512),
}


def train(recipe: Recipe, out: Path, workers: int, device: str, start: Path | None = None) -> list[float]:
    """Run the recipe, write the checkpoint with its tokenizer and the log, and return the losses."""
    packing = Packing(TOKENIZER / "tokenizer.json", recipe.seed, recipe.rows, recipe.length, recipe.manner)
    supply = batches(packing, recipe.steps, workers)
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    model = (load_checkpoint(start, Shape()) if start else TinyQwen3(Shape())).to(device)
    optimizer = _optimizer(model, recipe, fused=device == "cuda")
    in_blocks = device == "cuda" and recipe.length > LONGEST_DENSE
    loss_of = torch.compile(_loss, dynamic=False) if in_blocks else _loss
    log, started = [], time.monotonic()
    for step, batch in enumerate(supply):
        rate = _rate(recipe, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, targets, weights, dialogue = _to_device(batch, device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(model, ids, targets, weights, _block_mask(dialogue) if in_blocks else _dense_mask(dialogue))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 25 == 0 or step == recipe.steps - 1:
            log.append({"step": step, "loss": loss.item(), "rate": rate, "seconds": time.monotonic() - started})
            print(json.dumps(log[-1]), flush=True)
        if step % 150 == 149:
            save_checkpoint(model, out)
    save_checkpoint(model, out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if out.resolve() != TOKENIZER.resolve():
            shutil.copy(TOKENIZER / name, out / name)
    (out / "training_log.json").write_text(json.dumps({"recipe": asdict(recipe), "log": log}, indent=1) + "\n")
    return [entry["loss"] for entry in log]


def _loss(model: TinyQwen3, ids: Tensor, targets: Tensor, weights: Tensor, mask: Tensor | BlockMask) -> Tensor:
    logits = model(ids, _attention(mask))
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def _attention(mask: Tensor | BlockMask) -> Attention:
    if isinstance(mask, Tensor):
        return partial(functional.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
    return partial(flex_attention, block_mask=mask, enable_gqa=True)


def _dense_mask(dialogue_rl: Tensor) -> Tensor:
    """Each token sees what stands before it in its own dialogue."""
    length = dialogue_rl.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=dialogue_rl.device).tril()
    return (dialogue_rl[:, :, None] == dialogue_rl[:, None, :])[:, None] & causal


def _block_mask(dialogue_rl: Tensor) -> BlockMask:
    """The same in blocks: long rows pay only for what their dialogues see."""
    rows, length = dialogue_rl.shape

    def sees(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (dialogue_rl[row, query] == dialogue_rl[row, key])

    blocks: BlockMask = _make_blocks(sees, rows, None, length, length, device=str(dialogue_rl.device))
    return blocks


_make_blocks = torch.compile(create_block_mask)


def _to_device(batch: Batch, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids = torch.from_numpy(batch.ids_rl.astype(np.int64)).to(device, non_blocking=True)
    dialogue = torch.from_numpy(batch.dialogue_rl.astype(np.int32)).to(device, non_blocking=True)
    voice = torch.from_numpy(batch.voice_rl.astype(np.int64)).to(device, non_blocking=True)
    targets = ids.roll(-1, dims=1)
    weights = torch.tensor([WEIGHTS[v] for v in Voice], device=device)[voice.roll(-1, dims=1)]
    weights = weights * (dialogue == dialogue.roll(-1, dims=1)) * (dialogue > 0)
    weights[:, -1] = 0.0
    return ids, targets, weights, dialogue


def _optimizer(model: TinyQwen3, recipe: Recipe, *, fused: bool) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.98), fused=fused)


def _rate(recipe: Recipe, step: int) -> float:
    """Up over the warm-up, then straight down to nothing."""
    if step < recipe.warmup_steps:
        return recipe.peak_rate * (step + 1) / recipe.warmup_steps
    return recipe.peak_rate * (recipe.schedule_steps - step) / (recipe.schedule_steps - recipe.warmup_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="first")
    parser.add_argument("--start", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--short", action="store_const", const="short", dest="recipe")
    parser.add_argument("--steps", type=int, help="stop after so many steps of the recipe")
    parser.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 2))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    recipe = RECIPES[given.recipe]
    if given.steps is not None:
        recipe = replace(recipe, steps=given.steps)
    train(recipe, given.out, given.workers, given.device, given.start)


if __name__ == "__main__":
    main()
