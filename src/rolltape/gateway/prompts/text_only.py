"""Prompts for endpoints that take messages and return a message: nothing is tokenized, and a turn has no ids."""

from collections.abc import Sequence
from typing import Any

from rolltape.gateway.prompts.chat import ChatPrompts
from rolltape.gateway.prompts.rendering import BridgeRefusal, PromptIds
from rolltape.gateway.prompts.reply_form import ReplyForm
from rolltape.records.turn import NO_IDS, Ids

_NOTHING = PromptIds(ids=NO_IDS, message_starts=None)
_CHARACTERS_A_TOKEN = 4


class TextOnlyPrompts(ChatPrompts):
    """Replaces a model's prompts if the endpoint itself renders, tokenizes and parses."""

    def __init__(self) -> None:  # deliberately without the model folder of its parent
        self.folder = ""
        self.tool_ids_matter = False
        self.warning = None
        self.renderer = "the endpoint's own"
        self.vocabulary = None
        self.stop_ids = ()
        self.reply_form = ReplyForm(plain=True, call=None, think_end_id=None)
        self.fingerprint = "text-only"
        self.spell = lambda _: b""
        self.streams = False
        self._split_rules = None

    @property
    def switches_thinking(self) -> bool:
        return True  # the agent's setting is passed on

    def describe(self) -> str:
        return "prompts by the endpoint: messages are passed on, no token ids are recorded, and nothing can be trained"

    def template_options(self, thinking: bool | None) -> dict[str, Any]:
        return {}

    def render(self, *_: Any, **__: Any) -> PromptIds:
        return _NOTHING

    def bridge(self, *_: Any, **__: Any) -> BridgeRefusal:
        return BridgeRefusal.TEXT_ONLY

    def drops_thinking(self, new_messages: Sequence[dict[str, Any]], thinking: bool | None) -> bool:
        return False

    def count(self, text: str) -> int:
        return len(text) // _CHARACTERS_A_TOKEN

    def decode(self, ids: Ids) -> str:
        return ""
