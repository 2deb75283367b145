"""Which renderer a folder gets: one that is proven to render as its template, or none."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prompts.conversing import ASKED, HEARD, LOOK, SYSTEM, TINY, TOLD, called
from rolltape.errors import BadRequest, CheckpointError
from rolltape.gateway.prompts import ChatPrompts

Rewrite = Callable[[str], str | None]


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[Rewrite], Path]:
    """Copies the shipped tokenizer with its chat template rewritten; None: without one."""

    def copied(rewrite: Rewrite) -> Path:
        shutil.copy(TINY / "tokenizer.json", tmp_path)
        config: dict[str, Any] = json.loads((TINY / "tokenizer_config.json").read_text())
        template = rewrite(config.pop("chat_template"))
        config |= {} if template is None else {"chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return copied


def test_the_renderer_is_found_by_comparing_it_with_the_folders_template(prompts: ChatPrompts) -> None:
    assert prompts.renderer.startswith("qwen3 (renderers ")
    assert prompts.warning is None
    assert "renders as the folder's template on 8 probes" in prompts.describe()
    assert prompts.fingerprint in prompts.describe()
    assert prompts.switches_thinking
    assert not prompts.tool_ids_matter


def test_a_template_of_another_kind_is_not_taken_for_a_known_one(folder: Callable[[Rewrite], Path]) -> None:
    prompts = ChatPrompts(folder(lambda text: text.replace("# Tools", "# Your tools")))
    assert prompts.renderer.startswith("default ")
    assert prompts.warning is not None
    assert "its chat template renders every prompt whole" in prompts.warning
    assert "you can name qwen3" in prompts.warning
    assert "# Your tools" in prompts.decode(prompts.render([ASKED], [LOOK], None).ids)


def test_a_folders_own_template_shows_the_form_of_calls_where_replies_are_read_in_it(
    folder: Callable[[Rewrite], Path],
) -> None:
    hermes = ChatPrompts(TINY, renderer="default").reply_form
    assert hermes == ChatPrompts(TINY).reply_form
    assert hermes.call is not None
    other = ChatPrompts(folder(lambda text: text.replace("tool_call>", "action>"))).reply_form
    assert (other.plain, other.call) == (True, None)


def test_a_named_renderer_is_taken_and_warned_about_if_the_template_differs(folder: Callable[[Rewrite], Path]) -> None:
    prompts = ChatPrompts(folder(lambda text: text.replace("# Tools", "# Your tools")), renderer="qwen3")
    assert prompts.renderer.startswith("qwen3 ")
    assert prompts.warning is not None
    assert "renders otherwise" in prompts.warning
    assert ChatPrompts(TINY, renderer="qwen3").warning is None


def test_a_template_that_cannot_switch_thinking_off_takes_no_request_to(folder: Callable[[Rewrite], Path]) -> None:
    prompts = ChatPrompts(folder(lambda text: text.replace("enable_thinking", "no_such_option")))
    assert prompts.renderer.startswith("qwen3 ")
    assert not prompts.switches_thinking
    assert prompts.template_options(False) == {}
    assert prompts.decode(prompts.render([ASKED], None, False).ids).endswith("<|im_start|>assistant\n")


def test_without_a_template_a_renderer_must_be_named(folder: Callable[[Rewrite], Path]) -> None:
    bare = folder(lambda _: None)
    with pytest.raises(CheckpointError, match="no chat template to choose the renderer by; name one"):
        ChatPrompts(bare)
    assert ChatPrompts(bare, renderer="qwen3").warning is None


def test_a_template_may_be_a_file_of_its_own_or_one_of_several(folder: Callable[[Rewrite], Path]) -> None:
    own = folder(lambda _: "{{ 'said ' }}{{ messages[0].content }}")
    assert ChatPrompts(own).decode(ChatPrompts(own).render([ASKED], None, None).ids).startswith("said How")
    config = json.loads((own / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "several"}]
    (own / "tokenizer_config.json").write_text(json.dumps(config))
    several = ChatPrompts(own)
    assert several.decode(several.render([ASKED], None, None).ids) == "several"
    (own / "chat_template.jinja").write_text("a file")
    assert ChatPrompts(own).decode(ChatPrompts(own).render([ASKED], None, None).ids) == "a file"


def test_templates_may_use_what_transformers_adds_to_jinja(folder: Callable[[Rewrite], Path]) -> None:
    written = (
        "{% for one in [1, 2] %}{% if one == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ one }}{{ {'ü': '<'} | tojson }}{% endgeneration %}{% endfor %}{{ eos_token }}"
        "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    )
    prompts = ChatPrompts(folder(lambda _: written))
    assert prompts.decode(prompts.render([ASKED], [], None).ids) == '1{"ü": "<"}<|im_end|>'
    with pytest.raises(BadRequest, match="one message only"):
        prompts.render([ASKED, ASKED], None, None)


def test_a_wrong_folder_or_name_is_refused_with_what_to_do(tmp_path: Path, folder: Callable[[Rewrite], Path]) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json; have transformers write one"):
        ChatPrompts(tmp_path)
    with pytest.raises(CheckpointError, match=r"no renderer is called 'qwen4'; known are .*qwen3"):
        ChatPrompts(TINY, renderer="qwen4")
    with pytest.raises(CheckpointError, match="renderer llama-3 does not fit"):
        ChatPrompts(TINY, renderer="llama-3")
    with pytest.raises(CheckpointError, match="cannot implement explicit thinking_retention"):
        ChatPrompts(TINY, renderer="default", thinking_retention="all")
    with pytest.raises(CheckpointError, match="its chat template is not a Jinja template"):
        ChatPrompts(folder(lambda _: "{% if %}"))


def test_the_fingerprint_is_of_tokenizer_template_renderer_and_settings(folder: Callable[[Rewrite], Path]) -> None:
    same, again = ChatPrompts(TINY / "tokenizer.json"), ChatPrompts(folder(lambda text: text))
    assert same.fingerprint == again.fingerprint
    others = [
        ChatPrompts(TINY, renderer="default"),
        ChatPrompts(TINY, thinking_retention="all"),
        ChatPrompts(folder(lambda text: text + "{# changed #}")),
    ]
    assert len({prompts.fingerprint for prompts in [same, *others]}) == 4


def test_a_folders_own_template_renders_as_in_transformers() -> None:
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(TINY)
    whole = ChatPrompts(TINY, renderer="default")
    chat = [SYSTEM, ASKED, called({"city": "Köln"}, content="", thinking="hm"), HEARD, TOLD, ASKED]
    for thinking in (True, False):
        expected = tokenizer.apply_chat_template(
            chat, tools=[LOOK], add_generation_prompt=True, enable_thinking=thinking, return_dict=False
        )
        given = whole.render(chat, [LOOK], thinking)
        assert given.ids.tolist() == expected
        assert given.message_starts is None
    assert whole.template_options(False) == {"enable_thinking": False}
