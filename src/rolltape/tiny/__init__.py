"""The tiny engine: numpy runs a small Qwen3 model in this process, with real sampling and real logprobs."""

from rolltape.renamed import renamed
from rolltape.tiny.checkpoint import shipped_model
from rolltape.tiny.engine import InFlightPolicy, TinyEngine
from rolltape.tiny.request import EngineReply, Piece
from rolltape.tiny.sampling import Sampling, TopLogprob

__all__ = ["EngineReply", "InFlightPolicy", "Piece", "Sampling", "TinyEngine", "TopLogprob", "shipped_model"]

__getattr__ = renamed(__name__, {"EmbeddedEngine": "TinyEngine"})
