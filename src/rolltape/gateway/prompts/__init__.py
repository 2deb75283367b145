"""Convert chat messages to token ids and back: render a whole prompt, extend held ids, parse a reply."""

from rolltape.gateway.prompts.bridging import Bridged, BridgeRefusal
from rolltape.gateway.prompts.chat import ChatPrompts, Rendered, Retention
from rolltape.gateway.prompts.reply import Parsed, ParsedCall
from rolltape.gateway.prompts.tokenizer import SpecialText

__all__ = [
    "BridgeRefusal",
    "Bridged",
    "ChatPrompts",
    "Parsed",
    "ParsedCall",
    "Rendered",
    "Retention",
    "SpecialText",
]
