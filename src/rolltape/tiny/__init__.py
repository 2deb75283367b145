"""A small Qwen3 model run in this process: numpy alone, real sampling, real logprobs."""

from rolltape.tiny.engine import EmbeddedEngine, InFlight
from rolltape.tiny.replies import Piece, Reply
from rolltape.tiny.sampling import Sampling, TopLogprob

__all__ = ["EmbeddedEngine", "InFlight", "Piece", "Reply", "Sampling", "TopLogprob"]
