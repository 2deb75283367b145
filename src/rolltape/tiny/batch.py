"""Continuous batching: requests join and leave between steps, and each step feeds every running request."""

from collections import deque
from collections.abc import Iterator

from rolltape.records.turn import Finish
from rolltape.tiny.attention import TokenSpan
from rolltape.tiny.checkpoint import Floats
from rolltape.tiny.request import Request, VersionedModel
from rolltape.tiny.sampling import Softmax, choose, most_likely

# Prompt tokens read in one step beside the running replies: two pieces, about 15 ms with the shipped model.
_PROMPT_TOKENS_PER_STEP = 256


class RequestBatch:
    """The requests of an engine, waiting and running. Used by one thread."""

    def __init__(self, weights: VersionedModel, *, max_running: int, max_cached_tokens: int, context: int) -> None:
        self.weights = weights
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._max_running = max_running
        self._max_cached_tokens = max_cached_tokens
        self._context = context

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def abort(self, requests: list[Request]) -> None:
        """End requests with the ids sampled so far."""
        for request in requests:
            if request.finish is None:
                request.end(Finish.ABORT)
        self.waiting = deque(request for request in self.waiting if request.finish is None)
        self._forget_ended()

    def step(self) -> list[Request]:
        """Feed every running reply its last id, and some prompts a piece. Return the requests that advanced."""
        self._admit()
        fed = [request for request in self.running if not request.reads_prompt]
        fed += self._reading()
        changed = []
        # Replies that finish under older weights run beside those under the current ones.
        for weights in dict.fromkeys(request.weights for request in fed):
            assert weights is not None
            changed += self._feed(weights, [request for request in fed if request.weights is weights])
        self._forget_ended()
        return changed

    def _admit(self) -> None:
        if not self.waiting:
            return
        cached = sum(len(request.prompt) + len(request.sampled) for request in self.running)
        while self.waiting and len(self.running) < self._max_running:
            cached += len(self.waiting[0].prompt)
            if self.running and cached > self._max_cached_tokens:
                return
            request = self.waiting.popleft()
            request.begin(self.weights, self._context)
            self.running.append(request)

    def _reading(self) -> Iterator[Request]:
        """The requests whose prompts are read in a step: the oldest, so that all finish, then the least served ones."""
        reading = [request for request in self.running if request.reads_prompt]
        tokens = 0
        begun: set[bytes] = set()
        for request in [*reading[:1], *sorted(reading[1:], key=lambda request: request.fed)]:
            if tokens >= _PROMPT_TOKENS_PER_STEP:
                return
            key = request.take_over()
            if key is not None and key in begun:
                continue  # another request reads this piece now, so it can be copied at the next step
            if key is not None:
                begun.add(key)
            yield request
            tokens += len(request.next_span().ids)

    def _feed(self, weights: VersionedModel, requests: list[Request]) -> list[Request]:
        fed = [(request, request.next_span()) for request in requests]
        fed.sort(key=lambda pair: len(pair[1].ids) > 1)
        logits = weights.model.forward([span for _, span in fed])
        further: list[Request] = []
        rows: list[int] = []
        stop = 0
        for request, span in fed:
            stop += span.wanted
            if request.reads_prompt:
                if span.wanted and request.sampling.prompt_logprobs_from is not None:
                    _keep_prompt_logprobs(request, span, logits[stop - span.wanted : stop])
                request.fed += len(span.ids)
                request.keep()
                if request.reads_prompt:
                    continue
            else:
                request.fed += 1
            further.append(request)
            rows.append(stop - 1)
        self._sample(further, logits if len(rows) == len(logits) else logits[rows])
        return further

    def _sample(self, requests: list[Request], logits: Floats) -> None:
        choices = choose(logits, [request.sampling for request in requests], [request.draws for request in requests])
        for request, choice in zip(requests, choices, strict=True):
            if request.sampling.max_tokens == 0:
                request.end(Finish.LENGTH)
            elif choice is None:
                request.end(Finish.ERROR, f"logits at position {request.fed} are not finite; are the weights?")
            else:
                request.accept(choice, self._context)

    def _forget_ended(self) -> None:
        self.running = [request for request in self.running if request.finish is None]


def _keep_prompt_logprobs(request: Request, span: TokenSpan, logits: Floats) -> None:
    """Keep logprobs of prompt tokens. A token's logits are for the next token; the last one's are for the reply."""
    softmax = Softmax(logits)
    first = span.end - span.wanted + 1
    if not request.prompt_logprobs and request.sampling.prompt_logprobs_from == 0:
        request.prompt_logprobs.append(None)
        request.prompt_tops.append(())
    for row, place in enumerate(range(first, min(span.end + 1, len(request.prompt)))):
        if place < (request.sampling.prompt_logprobs_from or 0):
            continue
        request.prompt_logprobs.append(softmax.logprob(row, request.prompt[place]))
        if request.sampling.top_logprobs:
            logprobs = softmax.logprobs(row)
            request.prompt_tops.append(most_likely(logprobs, logprobs, request.sampling.top_logprobs))
