"""Convert chat messages to token ids and back: render a whole prompt, extend held ids, parse a reply."""

from rolltape.gateway.prompts.chat import ChatPrompts, Retention
from rolltape.gateway.prompts.rendering import BridgeRefusal, PromptIds
from rolltape.gateway.prompts.reply import Parsed, ParsedCall
from rolltape.gateway.prompts.text_only import TextOnlyPrompts
from rolltape.gateway.prompts.tokenizer import SpecialText

__all__ = [
    "BridgeRefusal",
    "ChatPrompts",
    "Parsed",
    "ParsedCall",
    "PromptIds",
    "Retention",
    "SpecialText",
    "TextOnlyPrompts",
]
