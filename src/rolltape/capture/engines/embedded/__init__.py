"""A small Qwen3 model run in this process: numpy alone, real sampling, real logprobs."""

from rolltape.capture.engines.embedded.engine import EmbeddedEngine, InFlight
from rolltape.capture.engines.embedded.replies import Piece, Reply
from rolltape.capture.engines.embedded.sampling import Sampling, TopLogprob

__all__ = ["EmbeddedEngine", "InFlight", "Piece", "Reply", "Sampling", "TopLogprob"]
