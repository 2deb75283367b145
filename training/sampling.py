"""Replies of a checkpoint through transformers, many at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.reply import Reply, read_reply

MAX_REPLY_TOKENS = 160
# Replies × longest prompt of one batch; bounds the memory of attention and cache.
BATCH_TOKENS = {"cuda": 400_000, "cpu": 100_000}
# Prompts × their length squared: a padded batch has a mask of that size.
BATCH_SCORES = {"cuda": 2_000_000_000, "cpu": 100_000_000}


class Sampler:
    """A checkpoint in transformers, float32, that replies to many prompts at once."""

    def __init__(self, folder: Path, device: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.to(device).eval()
        self.device = device
        self.ends = [self.tokenizer.convert_tokens_to_ids(mark) for mark in ("<|im_end|>", "<|endoftext|>")]

    def replies(self, prompts: list[str], temperature: float, seed: int) -> list[Reply]:
        """One reply per prompt; temperature 0 is greedy. Equal prompts are read once."""
        askers: dict[str, list[int]] = {}
        for i, prompt in enumerate(prompts):
            askers.setdefault(prompt, []).append(i)
        ids = {prompt: self.tokenizer.encode(prompt, add_special_tokens=False) for prompt in askers}
        waiting = sorted(askers, key=lambda prompt: -len(ids[prompt]))
        made: dict[int, Reply] = {}
        torch.manual_seed(seed)
        while waiting:
            longest = len(ids[waiting[0]])
            count = BATCH_TOKENS[self.device] // (longest * len(askers[waiting[0]]))
            count = max(1, min(count, BATCH_SCORES[self.device] // longest**2))
            batch, waiting = waiting[:count], waiting[count:]
            sampled = self._sample([ids[p] for p in batch], [len(askers[p]) for p in batch], temperature)
            made.update(zip((i for p in batch for i in askers[p]), map(self._read, sampled), strict=True))
        return [made[i] for i in range(len(prompts))]

    @torch.inference_mode()
    def _sample(self, prompts: list[list[int]], copies: list[int], temperature: float) -> list[list[int]]:
        """Read the prompts once, then write `copies` replies to each; a row that has ended leaves the batch."""
        padded = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(self.device)
        mask = padded["attention_mask"]
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        out = self.model(padded["input_ids"], attention_mask=mask, position_ids=places, logits_to_keep=1)
        rows = torch.repeat_interleave(torch.tensor(copies, device=self.device))
        cache, logits, mask, place = out.past_key_values, out.logits[rows, -1], mask[rows], places[rows, -1:]
        cache.batch_select_indices(rows)
        said: list[list[int]] = [[] for _ in rows]
        alive = list(range(len(rows)))
        for _ in range(MAX_REPLY_TOKENS):
            token = _choose(logits, temperature)
            for row, one in zip(alive, token.tolist(), strict=True):
                said[row].append(one)
            keep = torch.tensor([i for i, row in enumerate(alive) if said[row][-1] not in self.ends], dtype=torch.long)
            if len(keep) == 0:
                break
            if len(keep) < len(alive):
                alive = [alive[i] for i in keep.tolist()]
                keep = keep.to(self.device)
                token, mask, place = token[keep], mask[keep], place[keep]
                cache.batch_select_indices(keep)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            place = place + 1
            out = self.model(token[:, None], attention_mask=mask, position_ids=place, past_key_values=cache)
            logits = out.logits[:, -1]
        return said

    def _read(self, ids: list[int]) -> Reply:
        at = next((i for i, token in enumerate(ids) if token in self.ends), None)
        ended = at is not None and ids[at] == self.ends[0]
        return read_reply(str(self.tokenizer.decode(ids[:at])), ended=ended)


def _choose(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]
