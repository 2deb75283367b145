"""Chat messages ↔ token ids: the whole prompt rendered, what is new bridged onto what is held, the reply parsed."""

from rolltape.capture.prompts.bridging import Bridged, Refused
from rolltape.capture.prompts.chat import ChatPrompts, Rendered, Retention
from rolltape.capture.prompts.reply import Parsed, ParsedCall
from rolltape.capture.prompts.tokenizer import SpecialText

__all__ = [
    "Bridged",
    "ChatPrompts",
    "Parsed",
    "ParsedCall",
    "Refused",
    "Rendered",
    "Retention",
    "SpecialText",
]
