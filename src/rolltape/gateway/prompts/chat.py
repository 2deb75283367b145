"""The prompts of one model folder: render messages to ids, extend held ids, and parse replies."""

import re
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rolltape.errors import BadRequest
from rolltape.gateway.prompts import rendering
from rolltape.gateway.prompts.choosing import (
    TemplateMatch,
    choose,
    compare_with_template,
    renders_call_ids,
    takes_system_anywhere,
)
from rolltape.gateway.prompts.families import (
    DEFAULT,
    READS_PROMPT_END,
    RENDERS_IN_PARTS,
    THINK_END,
    THINK_START,
    Renderer,
    Tools,
    make,
    version,
)
from rolltape.gateway.prompts.rendering import BridgeRefusal, Prepared, PromptIds, SplicedIds, prepared
from rolltape.gateway.prompts.reply import Parsed, before_stop, parse_by_renderer, plain_text
from rolltape.gateway.prompts.reply_form import Thinking, find_reply_form
from rolltape.gateway.prompts.splitter import PlainText, ReplySplitter, find_split_rules
from rolltape.gateway.prompts.tokenizer import FolderTokenizer, SpecialText
from rolltape.records.turn import Ids, TokenChain

Retention = Literal["template", "tool_cycle", "all"]
Messages = Sequence[dict[str, Any]]

_TOOL_CYCLE = "tool_cycle"  # thinking is kept until the next user message
# Any family's mark of thinking. If a text only mentions it, this costs time and nothing else.
_THINKING = re.compile(r"<\|?/?(?:think|thought|channel)|◁/?think")
_PROMPT_END = 64  # ids: more than any family's generation prompt


class ChatPrompts:
    """Renders, bridges and parses for one model. It does not change, so threads may share it."""

    def __init__(
        self,
        folder: str | Path,
        *,
        renderer: str | None = None,
        thinking: bool | None = None,
        thinking_retention: Retention | None = None,
        special_text: SpecialText | str = SpecialText.PASS,
    ) -> None:
        """Load the prompts of a model folder, or of its tokenizer.json.

        With `renderer` None, one is found that renders as the chat template does. With `thinking` or
        `thinking_retention` None, the model's template decides.
        """
        folder = Path(folder)
        self._special_text = SpecialText(special_text)
        tokenizer = FolderTokenizer(folder.parent if folder.is_file() else folder, self._special_text)
        self._tokenizer = tokenizer
        choice = self._choice = choose(tokenizer, renderer)
        retention = thinking_retention or "template"
        kept = {} if retention == "template" else {"thinking_retention": retention}
        settings: list[bool | None] = [None] if choice.thinking_option is None else [None, True, False]
        self._renderers = {
            on: make(choice.name, tokenizer, **choice.options, **kept, **self._switch(on)) for on in settings
        }
        # These also bridge over user messages, which is correct if there is no thinking to drop.
        self._keeping = {
            on: make(choice.name, tokenizer, **choice.options, **self._switch(on), thinking_retention="all")
            for on, renderer in self._renderers.items()
            if renderer.effective_thinking_retention == _TOOL_CYCLE
        }
        by_default = self._renderers[None]
        self._options: dict[str, Any] = dict(kept)
        if self._special_text is not SpecialText.PASS:
            self._options["special_text"] = self._special_text.value
        self._thinking = thinking
        self._thinks_by_default = getattr(by_default.config, choice.thinking_option or "", None)
        self._folds = not takes_system_anywhere(by_default, tokenizer)
        self.folder = tokenizer.name_or_path
        self.tool_ids_matter = renders_call_ids(by_default)  # ids of calls are part of the prompt, and may be sampled
        self.warning = choice.warning  # shown when the gateway starts, or None
        self.renderer = f"{choice.name} (renderers {version()})"
        self.vocabulary: int | None = tokenizer.vocabulary  # one more than the largest id; None without token ids
        self.spell = tokenizer.spell
        self.stop_ids = tuple(by_default.get_stop_token_ids())
        self._split_rules = find_split_rules(choice.name, tokenizer, self.stop_ids)
        self.streams = self._split_rules is not None  # replies can be shown while they are sampled
        self.reply_form = find_reply_form(self._renderers.get(False, by_default), tokenizer)
        self.fingerprint = _fingerprint(tokenizer, self.renderer, by_default, self._options)

    @property
    def switches_thinking(self) -> bool:
        """Whether the model's template has a switch by which a request can turn thinking on or off."""
        return self._choice.thinking_option is not None

    @property
    def thinking_kept(self) -> str:
        """How long earlier thinking stays in prompts: `tool_cycle`, `all`, or another value of the renderer."""
        return str(self._renderers[None].effective_thinking_retention)

    def compare_with_template(self) -> TemplateMatch | None:
        """Compare the renderer with the folder's own template; None if there is no template, or it is the renderer."""
        if self._tokenizer.template is None or self._choice.name == DEFAULT:
            return None
        renderer = make(self._choice.name, self._tokenizer, **self._choice.options)
        return compare_with_template(renderer, self._tokenizer)

    def describe(self) -> str:
        """One line that names the renderer of the prompts and why it was chosen."""
        thinking = {None: "as in the template", True: "on", False: "off"}[self._thinking]
        return (
            f"prompts by {self.renderer}: {self._choice.why}; thinking {thinking}, "
            f"kept in history: {self.thinking_kept}; "
            f"special tokens spelled out in text: {self._special_text}; fingerprint {self.fingerprint}"
        )

    def template_options(self, thinking: bool | None) -> dict[str, Any]:
        """The options of a prompt that differ from the model's defaults. They are recorded in the prompt's root."""
        return self._options | self._switch(self._setting(thinking))

    def render(self, messages: Messages, tools: Tools, thinking: bool | None, *, opens_reply: bool = True) -> PromptIds:
        """Render the whole prompt; raises BadRequest for messages that the model's template refuses.

        With `opens_reply` it ends with the start of a reply.
        """
        ready = self._prepared(messages, opening=True)
        renderer, tools = self._renderer(thinking), tools or None  # templates treat an empty list differently
        try:
            return rendering.render(self._choice.name, renderer, ready, tools, opens_reply=opens_reply)
        except Exception as error:  # renderers and templates raise errors of many kinds
            raise BadRequest(f"the messages cannot be rendered for this model ({self.renderer}): {error}") from error

    def bridge(
        self,
        held_prompt: TokenChain,
        reply_ids: Ids,
        new_messages: Messages,
        tools: Tools,
        thinking: bool | None,
        *,
        nothing_to_drop: bool = False,
    ) -> PromptIds | BridgeRefusal:
        """The ids that follow a held prompt and its reply. For some families the cost depends only on what is new.

        `nothing_to_drop`: no reply since the last user message has thinking.
        """
        new = self._prepared(new_messages, opening=False)
        end = self._prompt_end(held_prompt)
        renderer = self._renderer(thinking)
        if nothing_to_drop:
            renderer = self._keeping.get(self._setting(thinking), renderer)
        return rendering.bridge(self._choice.name, renderer, end, reply_ids, new, tools or None)

    def splice(
        self, held_prompt: TokenChain, before: Messages, after: Messages, thinking: bool | None
    ) -> SplicedIds | None:
        """Keep a held prompt, and render again the reply to it and what follows.

        `before` are the messages between the previous reply and this one; `after` begins with this one. Returns None
        if this family, or these messages, can only be rendered in full.
        """
        if self._choice.name not in RENDERS_IN_PARTS:
            return None
        renderer, messages = self._renderer(thinking), [*before, *after]
        known, whole = (self._prepared(some, opening=False) for some in (before, messages))
        return rendering.splice(renderer, held_prompt, known, whole, len(before))

    def drops_thinking(self, new_messages: Messages, thinking: bool | None) -> bool:
        """Whether these new messages cause the template to drop earlier thinking."""
        on = self._setting(thinking)
        return on in self._keeping and any(message["role"] == "user" for message in new_messages)

    def has_thinking(self, reply_ids: Ids) -> bool:
        """Whether a reply has thinking, even if it is empty."""
        return _THINKING.search(self.decode(reply_ids)) is not None

    def parse(
        self,
        held_prompt: TokenChain,
        reply_ids: Ids,
        tools: Tools,
        thinking: bool | None,
        *,
        stop_ids: Sequence[int] = (),
        stop_string: str | None = None,
        calls_as_text: bool = False,
    ) -> Parsed:
        """Parse the ids of a reply to a prompt. `stop_string` ended the reply, if any did.

        `stop_ids` end the reply in addition to the model's own stop ids.
        `calls_as_text`: well-formed calls become text like malformed ones, since they are forbidden.
        """
        sampled, prompt_end, renderer = reply_ids.tolist(), self._prompt_end(held_prompt), self._renderer(thinking)
        if own := set(stop_ids).difference(self.stop_ids):
            sampled = before_stop(sampled, own)
        try:
            response = renderer.parse_response(sampled, tools=tools or None, prompt_ids=prompt_end.tolist())
        except (ValueError, RecursionError):
            response = None  # Python's JSON reader fails for numbers of many digits and for deep nesting
        splitter = self.splitter(held_prompt, thinking, [stop_string] if stop_string else [])
        if splitter is not None:
            return splitter.parse(sampled, response, calls_as_text=calls_as_text)
        stops = renderer.get_stop_token_ids()
        return parse_by_renderer(self._tokenizer, sampled, stops, response, stop_string, calls_as_text)

    def splitter(self, prompt: TokenChain, thinking: bool | None, stop_strings: Sequence[str]) -> ReplySplitter | None:
        """A splitter for the reply to a prompt, or None if replies of this model are parsed only when they have ended.

        `stop_strings` are all that may end the reply.
        """
        if self._split_rules is None:
            return None
        # The renderer knows whether the prompt has opened the thinking with which the reply begins.
        some, end = self._tokenizer.encode("x"), self._prompt_end(prompt).tolist()
        read = self._renderer(thinking).parse_response(some, tools=None, prompt_ids=end)
        return ReplySplitter(self._split_rules, read.reasoning_complete is False, stop_strings)

    def thinking_at(self, prompt: Ids, thinking: bool | None) -> Thinking | None:
        """Whether the reply to a prompt begins with thinking; None if it may, in an unknown form."""
        end = self.decode(prompt[-_PROMPT_END:]).rstrip()
        if end.endswith(THINK_START):
            return Thinking.BEGUN
        if end.endswith(THINK_END):
            return Thinking.OFF
        if self.reply_form.think_end_id is not None:
            return Thinking.POSSIBLE
        return None if self._setting(thinking) else Thinking.OFF

    def count(self, text: str) -> int:
        """How many tokens a text has."""
        return len(self._tokenizer.encode(text))

    def encode(self, text: str, *, add_special_tokens: bool) -> Ids:
        """The ids of a text, optionally with the special tokens that the tokenizer adds."""
        return np.array(self._tokenizer.encode_whole(text, add_special_tokens), dtype=np.int32)

    def decode(self, ids: Ids) -> str:
        """The text of ids, special tokens spelled out."""
        return self._tokenizer.decode(ids.tolist())

    def plain_splitter(self, stop_strings: Sequence[str]) -> PlainText | None:
        """The splitter for a reply that is not split into parts, or None if it is shown only when it has ended."""
        return PlainText(self._tokenizer, self.stop_ids, stop_strings) if self._tokenizer.is_byte_level else None

    def decode_reply(self, ids: Ids, stop_ids: Sequence[int], stop_string: str | None) -> str:
        """The text of a reply up to the id or the string that ended it, special tokens spelled out."""
        return plain_text(self._tokenizer, ids.tolist(), (*self.stop_ids, *stop_ids), stop_string)

    def _prepared(self, messages: Messages, *, opening: bool) -> Prepared:
        return prepared(messages, self._tokenizer, fold=self._folds, opening=opening)

    def _prompt_end(self, prompt: TokenChain) -> Ids:
        """The part of a prompt that the renderer reads."""
        start = max(len(prompt) - _PROMPT_END, 0) if self._choice.name in READS_PROMPT_END else 0
        return prompt.slice(start)

    def _setting(self, thinking: bool | None) -> bool | None:
        """The thinking switch of the template for a request; None for its default."""
        wanted = self._thinking if thinking is None else thinking
        return None if self._choice.thinking_option is None or wanted == self._thinks_by_default else wanted

    def _switch(self, on: bool | None) -> dict[str, Any]:
        option = self._choice.thinking_option
        return {} if on is None or option is None else {option: on}

    def _renderer(self, thinking: bool | None) -> Renderer:
        return self._renderers[self._setting(thinking)]


def _fingerprint(tokenizer: FolderTokenizer, renderer: str, by_default: Renderer, options: dict[str, Any]) -> str:
    """A digest of everything that determines the ids of a conversation, except a request's own options."""
    template = "" if tokenizer.template is None else tokenizer.template.source
    digest = blake2b(digest_size=8)
    for part in (tokenizer.source, template.encode(), renderer.encode(), repr(by_default.config).encode()):
        digest.update(blake2b(part, digest_size=16).digest())
    digest.update(repr(sorted(options.items())).encode())
    return digest.hexdigest()
