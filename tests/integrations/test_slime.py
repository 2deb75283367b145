"""slime's rollout function gives slime what the tape holds, from slime's own engine."""

import asyncio
from argparse import Namespace
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

import rolltape
from framework_samples import CLOSE, causal_model
from integrations.slime_stand_in import install
from rolltape.errors import GroupsError
from rolltape.export.formats import post_process_rewards
from rolltape.integrations import slime
from rolltape.integrations.background import BackgroundLoop
from rolltape.records.turn import LogprobKind
from rolltape.tiny import TinyEngine, shipped_model
from rolltape.tiny.server import EngineServer

Sample = install().Sample


@pytest.fixture(scope="module")
def router() -> Iterator[int]:
    """The port of a server with SGLang's API, as slime's router is one."""
    loop = BackgroundLoop("sglang")
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.Future(loop=loop.loop)

    async def serve() -> None:
        async with TinyEngine(shipped_model(), "tiny") as engine:
            runner = web.AppRunner(EngineServer(engine, shipped_model()).app(), shutdown_timeout=1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port.set_result(runner.addresses[0][1])
            await stop.wait()
            await runner.cleanup()

    async def started() -> int:
        return await port

    serving = loop.submit(serve())
    yield loop.submit(started()).result()
    loop.loop.call_soon_threadsafe(stop.set)
    serving.result()
    loop.close()


class Prompts:
    """A data source of slime's: sums, each prompt a group of samples."""

    def __init__(self, size: int) -> None:
        self.size, self.groups, self.samples = size, 0, 0

    def get_samples(self, count: int) -> list[list[Any]]:
        found = []
        for _ in range(count):
            number = self.groups % 3 + 2
            group = [
                Sample(
                    group_index=self.groups,
                    index=self.samples + at,
                    prompt=[{"role": "user", "content": f"What is {number} + 1?"}],
                    label=str(number + 1),
                    metadata={"level": number},
                )
                for at in range(self.size)
            ]
            self.groups, self.samples = self.groups + 1, self.samples + self.size
            found.append(group)
        return found


def arguments(run: Path, port: int, **config: Any) -> Namespace:
    """slime's arguments, as far as a rollout function needs them."""
    return Namespace(
        rolltape={"run": str(run), "thinking": False, "max_turns": 2, **config},
        sglang_router_ip="127.0.0.1",
        sglang_router_port=port,
        hf_checkpoint=str(shipped_model()),
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=24,
        rollout_max_context_len=None,
        eval_datasets=[],
        reward_key=None,
    )


@pytest.fixture
def closing() -> Iterator[None]:
    yield
    for job in list(slime._jobs.values()):
        job.close()
    slime._jobs.clear()


def flat(output: Any) -> list[Any]:
    return [sample for group in output.samples for rollout in group for sample in rollout]


@pytest.mark.usefixtures("closing")
def test_a_step_gives_slime_the_samples_that_the_tape_holds(tmp_path: Path, router: int) -> None:
    args, source = arguments(tmp_path / "run", router), Prompts(2)
    output = slime.generate_rollout(args, 0, source)
    assert [[len(rollout) for rollout in group] for group in output.samples] == [[1, 1], [1, 1]]
    given = flat(output)
    assert [(sample.group_index, sample.index, sample.rollout_id) for sample in given] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 2, 2),
        (1, 3, 3),
    ]
    run = rolltape.read(tmp_path / "run")
    for sample in given:
        made = rolltape.linearize(run.rollout(sample.metadata["rolltape"]["rollout"]), "exact").sample(0)
        start = made.prompt_tokens
        assert sample.tokens == made.ids.tolist()
        assert sample.loss_mask == made.trained_mask[start:].astype(int).tolist()
        trained = [value for value, one in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if one]
        assert trained == made.logprobs[made.trained_mask].tolist()
        assert sample.metadata["level"] in (2, 3)
    rewards, advantages = post_process_rewards(args, given)
    assert rewards == [sample.reward for sample in given]
    assert sum(advantages[:2]) == pytest.approx(0)


@pytest.mark.usefixtures("closing")
def test_with_top_p_samples_carry_the_ids_that_were_kept_and_logprobs_among_them(tmp_path: Path, router: int) -> None:
    args, source = arguments(tmp_path / "run", router), Prompts(2)
    args.rollout_top_p = 0.6
    given = flat(slime.generate_rollout(args, 0, source))
    run = rolltape.read(tmp_path / "run")
    for sample in given:
        ids, ends = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
        assert (len(ends), ends[-1]) == (sample.response_length + 1, len(ids))
        tokens = sample.tokens[-sample.response_length :]
        rows = [ids[start:stop] for start, stop in pairwise(ends)]
        assert [token in row for token, row in zip(tokens, rows, strict=True)] == [one == 1 for one in sample.loss_mask]
        with torch.no_grad():  # as slime's trainer computes them: among the kept ids of each token
            logits = causal_model()(torch.tensor([sample.tokens])).logits[0, -sample.response_length - 1 : -1]
        for at, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            if sample.loss_mask[at]:
                own = logits[at, row].log_softmax(-1)[row.index(token)].item()
                assert sample.rollout_log_probs[at] == pytest.approx(own, abs=CLOSE)
        (turn,) = run.rollout(sample.metadata["rolltape"]["rollout"]).turns
        assert turn.facts.logprob_kind is LogprobKind.AFTER_TRUNCATION
        assert turn.side["kept_ids"].values.tolist() == ids


@pytest.mark.usefixtures("closing")
def test_steps_are_done_when_the_next_one_is_asked_for_and_a_resumed_job_gets_its_step_again(
    tmp_path: Path, router: int
) -> None:
    args, source = arguments(tmp_path / "run", router), Prompts(2)
    slime.generate_rollout(args, 0, source)
    second = flat(slime.generate_rollout(args, 1, source))
    slime.generate_rollout(args, 2, source)
    slime._jobs.pop(id(args)).close()

    resumed, again = arguments(tmp_path / "run", router), Prompts(2)
    again.get_samples(2)  # as slime's data source is loaded: behind step 0
    once_more = flat(slime.generate_rollout(resumed, 1, again))
    assert [sample.tokens for sample in once_more] == [sample.tokens for sample in second]
    slime.generate_rollout(resumed, 2, again)
    assert len(rolltape.read(tmp_path / "run").index()) == 12


@pytest.mark.usefixtures("closing")
def test_an_evaluation_has_its_own_split_and_parameters_and_a_resumed_job_gets_it_again(
    tmp_path: Path, router: int
) -> None:
    (tmp_path / "sums.jsonl").write_text('{"text": "What is 2 + 1?", "label": "3"}\n' * 2)
    dataset = Namespace(
        name="sums",
        path=str(tmp_path / "sums.jsonl"),
        input_key="text",
        label_key="label",
        metadata_key=None,
        tool_key=None,
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        max_response_len=16,
        n_samples_per_eval_prompt=1,
    )

    def evaluate() -> dict[str, Any]:
        args = arguments(tmp_path / "run", router)
        args.eval_datasets, args.eval_max_prompt_len = [dataset], None
        data: dict[str, Any] = slime.generate_rollout(args, 3, None, evaluation=True).data["sums"]
        slime._jobs.pop(id(args)).close()
        return data

    first, again = evaluate(), evaluate()
    assert len(first["rewards"]) == 2
    assert [sample.metadata["rolltape"] for sample in again["samples"]] == [
        sample.metadata["rolltape"] for sample in first["samples"]
    ]
    run = rolltape.read(tmp_path / "run")
    assert [(row.source, row.step) for row in run.index()] == [("slime#sums", 3)] * 2
    assert {turn.temperature for rollout in run.rollouts() for turn in rollout.turns} == {0.0}


@pytest.mark.usefixtures("closing")
def test_a_prompt_that_comes_twice_in_a_step_is_two_tasks(tmp_path: Path, router: int) -> None:
    (tmp_path / "slime_named.py").write_text(
        "def named(sample):\n    return {'prompt': 'What is 2 + 1?', 'answer': 3, 'id': 'sum'}\n"
    )
    args = arguments(tmp_path / "run", router, to_task="python:slime_named:named")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        slime.generate_rollout(args, 0, Prompts(2))
    tasks = sorted(str(row.task_id) for row in rolltape.read(tmp_path / "run").index())
    assert tasks == ["sum", "sum", "sum~2", "sum~2"]


@pytest.mark.usefixtures("closing")
def test_slimes_own_rollout_function_gets_each_attempt_of_a_group_by_itself(tmp_path: Path, router: int) -> None:
    args, source = arguments(tmp_path / "run", router), Prompts(2)

    async def group_of(samples: list[Any]) -> list[Any]:
        return await asyncio.gather(*(slime.generate(args, sample, {}) for sample in samples))

    (group,) = source.get_samples(1)
    given = asyncio.run(group_of(group))
    assert [sample.index for sample in given] == [0, 1]
    rows = rolltape.read(tmp_path / "run").index()
    assert sorted(row.attempt for row in rows) == [0, 1]
    assert {row.id for row in rows} == {sample.metadata["rolltape"]["rollout"] for sample in given}


@pytest.mark.usefixtures("closing")
def test_slimes_own_evaluation_gets_each_prompt_of_each_dataset_with_its_own_parameters(
    tmp_path: Path, router: int
) -> None:
    args = arguments(tmp_path / "run", router)
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 16}

    def prompts() -> list[Any]:  # slime counts the samples of each dataset from 0
        return [Sample(index=0, prompt=f"What is {number} + 1?", label=str(number + 1)) for number in (2, 3)]

    async def evaluate(samples: list[Any]) -> list[Any]:
        return await asyncio.gather(*(slime.generate(args, sample, greedy, evaluation=True) for sample in samples))

    given = asyncio.run(evaluate(prompts()))
    run = rolltape.read(tmp_path / "run")
    rollouts = [run.rollout(sample.metadata["rolltape"]["rollout"]) for sample in given]
    assert [rollout.head.task["prompt"] for rollout in rollouts] == ["What is 2 + 1?", "What is 3 + 1?"]
    assert {turn.temperature for rollout in rollouts for turn in rollout.turns} == {0.0}


@pytest.mark.usefixtures("closing")
def test_an_attempt_that_failed_is_a_sample_that_does_not_train(tmp_path: Path, router: int) -> None:
    args, source = arguments(tmp_path / "run", router, to_task="python:slime_tasks:broken"), Prompts(2)
    args.rollout_top_p = 0.9
    (tmp_path / "slime_tasks.py").write_text(
        "def raises(task, answer):\n    raise RuntimeError('the checker broke')\n"
        "def broken(sample):\n"
        "    return {'prompt': 'What is 2 + 1?', 'check': 'python:slime_tasks:raises', 'id': str(sample.group_index)}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        given = flat(slime.generate_rollout(args, 0, source))
    assert [(sample.remove_sample, sample.loss_mask, sample.status.value) for sample in given] == [
        (True, [0], "failed")
    ] * 4
    # slime asserts this of all samples, also of those that do not train.
    assert {tuple(sample.rollout_top_p_token_offsets) for sample in given} == {(0, 0)}
    assert post_process_rewards(args, given)[1] == [0.0] * 4


@pytest.mark.usefixtures("closing")
def test_an_attempt_that_failed_leaves_slimes_own_baseline_as_it_is(tmp_path: Path, router: int) -> None:
    args, source = arguments(tmp_path / "run", router, to_task="python:slime_graded:graded"), Prompts(4)
    args.rollout_batch_size, args.n_samples_per_prompt = 1, 4
    (tmp_path / "slime_graded.py").write_text(
        "grades = iter([1.0, 1.0, 0.0])\n"
        "def grade(task, answer):\n    return next(grades)\n"
        "def graded(sample):\n    return {'prompt': 'What is 2 + 1?', 'check': 'python:slime_graded:grade'}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        given = flat(slime.generate_rollout(args, 0, source))
    assert sorted(sample.reward for sample in given if not sample.remove_sample) == [0.0, 1.0, 1.0]
    assert [sample.reward for sample in given if sample.remove_sample] == [pytest.approx(2 / 3)]


def test_arguments_that_cannot_work_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(GroupsError, match=r"no rolltape\.run; write `rolltape: \{run:"):
        slime.SlimeRollouts(Namespace())
    args = arguments(tmp_path / "run", 1, max_turn=3)
    with pytest.raises(
        GroupsError, match="custom config: 'max_turn' is unknown; known are policy, run, to_task, source"
    ):
        slime.SlimeRollouts(args)
    with pytest.raises(GroupsError, match="custom config: max_turns is 0; give 1 or more"):
        slime.SlimeRollouts(arguments(tmp_path / "run", 1, max_turns=0))
