"""Model folders: a template, a renderer, or a tokenizer that is another model's is named."""

import json
import shutil
from pathlib import Path

import pytest

from rolltape.doctor import CheckResult, Severity, Stack, diagnose
from rolltape.tiny import shipped_model

BAD = (Severity.WARNING, Severity.FAULT)
# As Llama 3 has it.
OTHER_TEMPLATE = """{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""


async def diagnosed(folder: Path, renderer: str | None = None) -> dict[str, CheckResult]:
    return {one.check: one async for one in diagnose(Stack(model=folder, renderer=renderer))}


def bad(results: dict[str, CheckResult]) -> dict[str, str]:
    return {one.check: one.verdict.value for one in results.values() if one.verdict in BAD}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copied = tmp_path / "model"
    copied.mkdir()
    for file in shipped_model().iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, copied / file.name)
    return copied


async def test_a_folder_by_itself_is_checked_without_weights(folder: Path) -> None:
    results = await diagnosed(folder)
    assert bad(results) == {}
    assert results["template"].measured == "renderer qwen3 gives the ids of the folder's template on 8 conversations"
    assert results["bridging"].figures["rendered"] == ["user message after thinking (new user message)"]


async def test_a_template_of_another_model_is_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(OTHER_TEMPLATE)
    results = await diagnosed(folder)
    assert bad(results) == {"template": "warning", "special tokens": "fault", "bridging": "warning"}
    assert "<|start_header_id|>" in results["special tokens"].measured


async def test_a_renderer_of_another_model_is_named_with_the_first_difference(folder: Path) -> None:
    results = await diagnosed(folder, renderer="nemotron-3")
    assert bad(results)["template"] == "fault"
    assert "renderer nemotron-3 and the folder's template give different ids from id" in results["template"].measured


async def test_a_renderer_whose_tokens_are_not_there_is_a_fault(folder: Path) -> None:
    results = await diagnosed(folder, renderer="deepseek-v3")
    assert bad(results) == {"template": "fault"}


async def test_more_tokens_than_embeddings_are_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 4000}))
    assert bad(await diagnosed(folder)) == {"vocabulary": "fault"}


async def test_another_end_of_turn_in_the_generation_config_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert bad(await diagnosed(folder)) == {"stop ids": "fault"}


async def test_a_folder_that_is_none_is_a_fault(tmp_path: Path) -> None:
    results = await diagnosed(tmp_path)
    assert bad(results) == {"template": "fault"}
    assert "no tokenizer.json" in results["template"].measured
    results = await diagnosed(tmp_path / "missing")
    assert f"{tmp_path / 'missing'}: there is no such folder" in results["template"].measured
