"""The tiny engine: a small Qwen3 model run in this process by numpy, with real sampling and real logprobs."""

from rolltape.tiny.checkpoint import shipped_model
from rolltape.tiny.engine import EmbeddedEngine, InFlightPolicy
from rolltape.tiny.request import EngineReply, Piece
from rolltape.tiny.sampling import Sampling, TopLogprob

__all__ = ["EmbeddedEngine", "EngineReply", "InFlightPolicy", "Piece", "Sampling", "TopLogprob", "shipped_model"]
