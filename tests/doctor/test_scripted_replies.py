"""The replies of the scripted model, in the form of every renderer family."""

from pathlib import Path

import numpy as np
import pytest

from prompts.family_folders import prompts_of
from rolltape.doctor.agent.scripted_model import STEPS, harmless_call, reply_forms
from rolltape.doctor.agent.scripted_replies import split_unusually, write_first
from rolltape.doctor.model_checks import ModelProbe, check_model
from rolltape.doctor.results import Severity
from rolltape.gateway.prompts.families import guessable
from rolltape.gateway.prompts.tokenizer import FolderTokenizer
from rolltape.records.turn import TokenChain

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]},
    },
}
# It leaves thinking out of every later prompt, and knows no calls.
WITHOUT_CALLS = {"deepseek-r1"}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("family", guessable())
def test_every_step_is_a_reply_that_the_gateway_reads_back(family: str, scratch: Path) -> None:
    prompts = prompts_of(family, scratch)
    call = harmless_call([LOOK])
    asked = prompts.render([{"role": "user", "content": "Go."}], [LOOK], None).ids
    for place, step in enumerate(STEPS):
        ids = write_first(prompts, reply_forms(step(call)), [LOOK])
        assert ids is not None
        split = split_unusually(prompts, ids)
        assert int(split[-1]) in prompts.stop_ids
        assert not np.isin(split[:-1], prompts.stop_ids).any()
        assert prompts.decode(split) == prompts.decode(ids)
        read = prompts.parse(TokenChain(asked), split, [LOOK], None)
        assert bool(read.calls) is (place < 3 and family not in WITHOUT_CALLS)


@pytest.mark.parametrize("family", guessable())
def test_bridging_is_told_for_every_family(family: str, scratch: Path) -> None:
    prompts = prompts_of(family, scratch)
    folder = Path(prompts.folder)
    results = {one.check: one for one in check_model(ModelProbe(folder, prompts, FolderTokenizer(folder)))}
    expected = (Severity.WARNING,) if family in WITHOUT_CALLS else (Severity.OK, Severity.NOTE)
    assert results["bridging"].verdict in expected
