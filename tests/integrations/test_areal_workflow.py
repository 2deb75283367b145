"""AReaL's workflow gives AReaL whole groups, sampled by AReaL's own inference engine."""

import asyncio
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import rolltape
from framework_samples import causal_model
from integrations.areal_stand_in import install
from rolltape.errors import GroupsError
from rolltape.tiny import shipped_model

install()
areal = import_module("rolltape.integrations.areal")
context = import_module("areal").workflow_context
ModelResponse = import_module("areal.api").ModelResponse

pytestmark = pytest.mark.filterwarnings("ignore::rolltape.export.formats.LeftOutWarning")
CHANGES_AFTER = 2  # tokens of a reply: AReaL's engine goes on under new weights


class Engine:
    """An inference engine of AReaL's that samples with the shipped model, while its weights change."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[Any] = []

    def get_version(self) -> int:
        return self.version

    async def agenerate(self, request: Any) -> Any:
        self.asked.append(request)
        wanted = request.gconfig
        ids: list[int] = []
        logprobs: list[float] = []
        new, held = list(request.input_ids), None
        while len(ids) < wanted.max_new_tokens and (not ids or ids[-1] not in wanted.stop_token_ids):
            with torch.no_grad():
                output = causal_model()(input_ids=torch.tensor([new]), past_key_values=held, use_cache=True)
            held = output.past_key_values
            spread = torch.log_softmax(output.logits[0, -1].float() / wanted.temperature, -1)
            new = [int(torch.multinomial(spread.exp(), 1))]
            ids += new
            logprobs.append(float(spread[new[0]]))
        versions = [self.version + (at >= CHANGES_AFTER) for at in range(len(ids))]
        ended = "stop" if ids[-1] in wanted.stop_token_ids else "length"
        return ModelResponse(output_tokens=ids, output_logprobs=logprobs, output_versions=versions, stop_reason=ended)


@pytest.fixture(autouse=True)
def closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "areal_tasks.py").write_text("def broken(task, answer):\n    raise RuntimeError('the checker broke')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    areal.close_all()
    context.set(context.WorkflowContext())


def workflow(run: Path, **given: Any) -> Any:
    collect = {
        "model": str(shipped_model()),
        "group_size": 2,
        "thinking": False,
        "max_turns": 1,
        "sampling": {"temperature": 1.0, "max_tokens": 16},
    }
    return areal.RolltapeWorkflow(str(run), collect, **given)


def task(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": f"t{number}", "prompt": f"What is {number} + 1?", "answer": number + 1, **fields}


def test_an_episode_is_a_whole_group_with_a_version_for_each_token(tmp_path: Path) -> None:
    engine = Engine()
    engine.version = 3
    batch = asyncio.run(workflow(tmp_path / "run", advantages_as_rewards=False).arun_episode(engine, task(1)))
    rollouts = list(rolltape.read(tmp_path / "run").rollouts(step=3))
    samples = {tuple(made.ids.tolist()): made for one in rollouts for made in rolltape.linearize(one).samples()}
    assert len(batch["input_ids"]) == len(rollouts) == 2
    for at, here in enumerate(batch["attention_mask"]):
        sample = samples[tuple(batch["input_ids"][at][here].tolist())]
        mask = batch["loss_mask"][at].bool()
        assert batch["logprobs"][at][mask].tolist() == sample.logprobs[sample.trained_mask].tolist()
        versions = batch["versions"][at][mask].tolist()
        assert versions == [3, 3, *[4] * (len(versions) - CHANGES_AFTER)][: len(versions)]
        assert batch["rewards"][at] == sample.reward
    assert {request.rid for request in engine.asked} == {s.id for one in rollouts for s in one.sessions}


def test_a_group_with_nothing_to_train_is_rejected(tmp_path: Path) -> None:
    broken = task(1, check="python:areal_tasks:broken")
    assert asyncio.run(workflow(tmp_path / "run").arun_episode(Engine(), broken)) is None


def test_workflows_that_areal_makes_anew_share_a_gateway_and_a_task_may_come_twice(tmp_path: Path) -> None:
    engine = Engine()

    async def episodes() -> list[Any]:
        made = [workflow(tmp_path / "run") for _ in range(2)]
        return await asyncio.gather(*(one.arun_episode(engine, task(1)) for one in made))

    given = asyncio.run(episodes())
    assert len(areal._sources) == 1
    assert [len(batch["rewards"]) for batch in given] == [2, 2]
    assert {row.task_id for row in rolltape.read(tmp_path / "run").index()} == {"t1", "t1~2"}


def test_an_evaluation_is_under_a_split_of_its_own_and_comes_again_from_the_tape(tmp_path: Path) -> None:
    engine = Engine()

    async def episode() -> None:
        context.set(context.WorkflowContext(is_eval=True))
        await workflow(tmp_path / "run").arun_episode(engine, task(1))

    asyncio.run(episode())
    areal.close_all()
    asked = len(engine.asked)
    asyncio.run(episode())  # a job that is recovered evaluates the same version again
    assert len(engine.asked) == asked
    assert {row.source for row in rolltape.read(tmp_path / "run").index()} == {"areal#eval"}


def test_a_job_that_is_recovered_gets_the_groups_of_its_version_from_the_tape(tmp_path: Path) -> None:
    engine = Engine()

    async def episodes(*versions: int) -> list[Any]:
        found = []
        for engine.version in versions:
            found.append(await workflow(tmp_path / "run").arun_episode(engine, task(1)))
        return found

    first = asyncio.run(episodes(0, 1))
    areal.close_all()
    asked = len(engine.asked)
    (again,) = asyncio.run(episodes(1))
    assert torch.equal(again["input_ids"], first[1]["input_ids"])
    assert len(engine.asked) == asked


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GroupsError, match="group_size"):
        areal.RolltapeWorkflow("run", {"group_size": "many"})
    with pytest.raises(GroupsError, match="collect: 'max_turn' is unknown; known are source, split"):
        areal.RolltapeWorkflow("run", {"max_turn": 3})
