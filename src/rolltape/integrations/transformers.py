"""`TransformersEngine`: a transformers model in this process as the engine behind the gateway.

The trainer's own model samples, with its current weights. It needs no server and no second copy of the weights. It is
meant for small models, because it is much slower than an inference engine.
"""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rolltape.gateway.engines.function import FunctionEngine, SampledReply
from rolltape.gateway.engines.protocol import Generation
from rolltape.records.turn import LogprobKind

_GATHER_S = 0.005  # how long a batch waits for more requests


class _Request(NamedTuple):
    prompt_ids: list[int]
    wanted: Generation
    reply: "asyncio.Future[SampledReply]"


class TransformersEngine(FunctionEngine):
    """Samples with a causal language model of transformers. Requests that come together form one batch.

    Example:

        model = AutoModelForCausalLM.from_pretrained(folder)
        engine = TransformersEngine(model)

    Do not train the model while it samples: it always uses the current weights.
    Logprobs are after temperature, of the whole distribution, as trainers compute them. Seeds are applied.
    """

    def __init__(self, model: Any, *, max_batch: int = 64) -> None:
        """`model` is the model itself, not a wrapper around it. `max_batch` limits the rows of one batch."""
        super().__init__(
            self._sample,
            name=f"transformers ({type(model).__name__})",
            context=getattr(model.config, "max_position_embeddings", None),
            logprob_kind=LogprobKind.AFTER_TEMPERATURE,
            applies=("temperature", "top_p", "top_k", "seed", "max_tokens"),
        )
        self.loop = None  # it does not depend on the loop in which it was made
        self._model = model
        self._max_batch = max_batch
        self._waiting: list[_Request] = []
        self._sampling: asyncio.Task[None] | None = None

    async def _sample(self, prompt_ids: list[int], wanted: Generation) -> SampledReply:
        request = _Request(prompt_ids, wanted, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._sampling is None or self._sampling.done():
            self._sampling = asyncio.ensure_future(self._sample_waiting())
        return await request.reply

    async def _sample_waiting(self) -> None:
        """Sample batches until no request waits."""
        while self._waiting:
            await asyncio.sleep(_GATHER_S)
            batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
            batch = [request for request in batch if not request.reply.done()]
            prompts, wanted = [one.prompt_ids for one in batch], [one.wanted for one in batch]
            try:
                replies = await asyncio.to_thread(sample_replies, self._model, prompts, wanted) if batch else []
            except Exception as error:  # noqa: BLE001 - the model's: whoever waits for a reply is told
                for request in batch:
                    if not request.reply.done():
                        request.reply.set_exception(error)
                continue
            for request, reply in zip(batch, replies, strict=True):
                if not request.reply.done():  # it was aborted in the meantime
                    request.reply.set_result(reply)


@torch.no_grad()
def sample_replies(model: Any, prompts: Sequence[Sequence[int]], wanted: Sequence[Generation]) -> list[SampledReply]:
    """Continue prompts in one batch."""
    rows = [_Row(one) for one in wanted]
    was_training = model.training
    model.eval()
    try:
        for token_b, logprob_b in _sampled_tokens(model, prompts, rows):
            for row, token, logprob in zip(rows, token_b.tolist(), logprob_b.tolist(), strict=True):
                row.add(token, logprob)
            if all(row.finish for row in rows):
                break
    finally:
        model.train(was_training)
    return [(row.ids, row.logprobs, row.finish) for row in rows]


class _Row:
    """The reply of one row of a batch, so far."""

    def __init__(self, wanted: Generation) -> None:
        sampling = wanted.sampling
        self.temperature = 1.0 if sampling.temperature is None else sampling.temperature
        self.top_p = 1.0 if sampling.top_p is None else sampling.top_p
        self.top_k = sampling.top_k or -1
        self.seed = sampling.seed
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish = ""  # it has not ended
        self._stop_ids = wanted.stop_ids
        self._max_tokens = sampling.max_tokens

    def add(self, token: int, logprob: float) -> None:
        if self.finish:
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in self._stop_ids:
            self.finish = "stop"
        elif len(self.ids) == self._max_tokens:
            self.finish = "length"


def _sampled_tokens(model: Any, prompts: Sequence[Sequence[int]], rows: Sequence[_Row]) -> Any:
    """Yield the next token of every row, and its logprob, without end."""
    device = model.device
    longest = max(map(len, prompts))
    ids_bl = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts], device=device)
    mask_bl = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
    position_bl = (mask_bl.cumsum(-1) - 1).clamp(min=0)
    temperature_b = torch.tensor([row.temperature or 1.0 for row in rows], device=device)
    generators = [None if row.seed is None else torch.Generator(device).manual_seed(row.seed) for row in rows]
    cache = None
    for _ in itertools.count():
        output = model(
            input_ids=ids_bl,
            attention_mask=mask_bl,
            position_ids=position_bl,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        logprobs_bv = (output.logits[:, -1].float() / temperature_b[:, None]).log_softmax(-1)
        token_b = torch.stack(
            [_choose(logprobs_v, row, one) for logprobs_v, row, one in zip(logprobs_bv, rows, generators, strict=True)]
        )
        yield token_b, logprobs_bv.gather(-1, token_b[:, None])[:, 0]
        ids_bl = token_b[:, None]
        mask_bl = torch.cat([mask_bl, mask_bl.new_ones(len(rows), 1)], dim=1)
        position_bl = position_bl[:, -1:] + 1


def _choose(logprobs_v: Tensor, row: _Row, generator: torch.Generator | None) -> Tensor:
    """Sample one token with a row's own parameters."""
    if row.temperature == 0:
        return logprobs_v.argmax()
    probs_v = logprobs_v.exp()
    if row.top_k > 0:
        probs_v = probs_v.where(probs_v >= probs_v.topk(min(row.top_k, len(probs_v))).values[-1], 0)
    if row.top_p < 1:
        sorted_v, order_v = probs_v.sort(descending=True)
        before_v = sorted_v.cumsum(0) - sorted_v
        probs_v = probs_v.scatter(0, order_v[before_v >= row.top_p * sorted_v.sum()], 0)
    return torch.multinomial(probs_v, 1, generator=generator)[0]
