"""verl's manager of agent loops gives verl's trainers what the tape holds, sampled by verl's own client."""

import asyncio
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, get_adv_estimator_fn
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.tensordict_utils import assign_non_tensor_data, get_tensordict
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.config import ActorConfig
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

import rolltape
from framework_samples import causal_model
from rolltape.errors import GroupsError
from rolltape.integrations.verl import RolltapeManager, data_proto
from rolltape.records.rollout import EventKind
from rolltape.tiny import shipped_model

pytestmark = pytest.mark.filterwarnings("ignore::rolltape.export.formats.LeftOutWarning")


class Remote:
    """A method as Ray's handles have it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, **given: Any) -> "asyncio.Future[Any]":
        async def call() -> Any:
            return self._function(**given)

        return asyncio.ensure_future(call())


class Servers:
    """verl's balancer and its one server, which samples with the shipped model."""

    def __init__(self) -> None:
        self.global_steps = 0
        self.sessions: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.require_acquire_fields = self.require_release_fields = Remote(list)
        self.acquire_server = Remote(self._acquire)
        self.release_server = Remote(lambda server_id: None)
        self.generate = Remote(self._generate)

    def _acquire(self, request_id: str) -> tuple[str, "Servers"]:
        self.sessions.append(request_id)
        return "one", self

    def _generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        self.asked.append(sampling_params)
        temperature = sampling_params["temperature"]
        ids, logprobs, new, held = list(prompt_ids), [], list(prompt_ids), None
        for _step in range(sampling_params["max_tokens"]):
            with torch.no_grad():
                output = causal_model()(input_ids=torch.tensor([new]), past_key_values=held, use_cache=True)
            held = output.past_key_values
            spread = torch.log_softmax(output.logits[0, -1].float() / (temperature or 1.0), -1)
            token = int(torch.multinomial(spread.exp(), 1)) if temperature else int(spread.argmax())
            new = [token]
            ids.append(token)
            logprobs.append(float(spread[token]))
            if token in sampling_params["stop_token_ids"]:
                break
        return TokenOutput(
            token_ids=ids[len(prompt_ids) :],
            log_probs=logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": self.global_steps},
        )


def config(run: Path, **given: Any) -> Any:
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "model": {"path": str(shipped_model())},
                "rollout": {
                    "name": "vllm",
                    "n": 2,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "top_k": -1,
                    "prompt_length": 40,
                    "response_length": 64,
                    "max_model_len": 512,
                    "val_kwargs": {"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": -1},
                },
            },
            "rolltape": {"run": str(run), "thinking": False, "max_turns": 2, **given},
        }
    )


Make = Callable[..., RolltapeManager]


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def make(tmp_path: Path, servers: Servers) -> Iterator[Make]:
    made = []

    def manager(**given: Any) -> RolltapeManager:
        wanted = config(tmp_path / "run", **given)
        found = load_class_from_fqn("rolltape.integrations.verl.RolltapeManager", "AgentLoopManager")
        client = LLMServerClient(wanted, servers)
        made.append(found.create(config=wanted, llm_client=client, teacher_client=None))
        one: RolltapeManager = made[-1]
        return one

    yield manager
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def tasks_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verl_tasks.py").write_text(
        "def broken(task, answer):\n    raise RuntimeError('the checker broke')\n"
        "def ask(task, seed):\n"
        "    first = yield 'What is 2 + 1?'\n    return seed % 2\n"
        "def talk(task, seed):\n"
        "    first = yield 'What is 2 + 1?'\n    second = yield 'Are you sure?'\n    return 1.0\n"
        "def asking(row):\n"
        "    return {'id': row['uid'], 'environment': 'message', 'episode': 'python:verl_tasks:ask'}\n"
        "def failing(row):\n"
        "    return {'id': row['uid'], 'prompt': 'What is 2 + 1?', 'check': 'python:verl_tasks:broken'}\n"
        "def talking(row):\n"
        "    return {'id': row['uid'], 'environment': 'message', 'episode': 'python:verl_tasks:talk'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "verl_tasks", raising=False)


def columns(count: int) -> dict[str, Any]:
    """Rows of verl's dataset, each a sum."""
    rows = [
        {
            "raw_prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"index": number},
            "data_source": "sums",
            "uid": f"uid-{number}",
        }
        for number in range(count)
    ]
    return {name: np.array([row[name] for row in rows], dtype=object) for name in rows[0]}


def batch_of(step: int, *, count: int = 2, validate: bool = False) -> DataProto:
    """What verl's trainer gives its manager: each prompt as often as it shall be attempted."""
    data = DataProto.from_dict(
        tensors={"dummy": torch.zeros(count, 1)},
        non_tensors=columns(count),
        meta_info={"global_steps": step, "validate": validate},
    )
    return data.repeat(repeat_times=1 if validate else 2, interleave=True)


def test_each_row_is_the_sample_that_the_tape_holds(make: Make, servers: Servers, tmp_path: Path) -> None:
    servers.global_steps = 3
    given = batch_of(4)
    output = make().generate_sequences(given)
    joined = given.union(output)
    assert joined.non_tensor_batch["uid"].tolist() == ["uid-0", "uid-0", "uid-1", "uid-1"]
    run = rolltape.read(tmp_path / "run")
    made = {
        sample.id: sample
        for rollout in run.rollouts(step=4)
        for sample in rolltape.linearize(rollout, "exact").samples()
    }
    assert len(made) == 4
    for row in joined:
        sample = made.pop(row.non_tensor_batch["sample"])
        here = row.batch["attention_mask"].bool()
        assert row.batch["input_ids"][here].tolist() == sample.ids.tolist()
        mask = row.batch["response_mask"].bool()
        assert row.batch["rollout_log_probs"][mask].tolist() == sample.logprobs[sample.trained_mask].tolist()
        assert row.batch["rm_scores"].sum() == sample.reward
        assert row.non_tensor_batch["min_global_steps"] == row.non_tensor_batch["max_global_steps"] == 3
    assert output.batch["prompts"].shape[1] == 40
    assert output.batch["responses"].shape[1] == 64


def test_a_session_stays_with_one_server_and_gets_verls_parameters(
    make: Make, servers: Servers, tmp_path: Path
) -> None:
    make().generate_sequences(batch_of(1))
    sessions = {s.id for rollout in rolltape.read(tmp_path / "run").rollouts() for s in rollout.sessions}
    assert set(servers.sessions) == sessions
    assert {(one["temperature"], one["max_tokens"]) for one in servers.asked} == {(1.0, 64)}


def test_verls_loss_has_ratio_one_and_the_advantages_of_the_tape(make: Make, tmp_path: Path) -> None:
    batch = make(to_task="python:verl_tasks:asking").generate_sequences(batch_of(1)).batch
    scores = batch["rm_scores"]
    estimate = get_adv_estimator_fn("rolltape")
    advantages, _ = estimate(
        token_level_rewards=scores,
        response_mask=batch["response_mask"],
        reward_baselines=batch["reward_baselines"],
        index=None,
        config=None,
    )
    rewards = scores.sum(-1).reshape(2, 2)
    wanted = (rewards - rewards.mean(1, keepdim=True)).reshape(-1, 1) * batch["response_mask"]
    assert torch.allclose(advantages, wanted)
    assert advantages.abs().sum() > 0
    with torch.no_grad():
        logits = causal_model()(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
        ).logits
    width = batch["responses"].shape[1]
    new = logprobs_from_logits(logits[:, -width - 1 : -1].contiguous(), batch["responses"])
    mask = batch["response_mask"].bool()
    assert ((new - batch["rollout_log_probs"]).exp()[mask] - 1).abs().max() < 1e-3
    loss, _ = compute_policy_loss_vanilla(
        old_log_prob=batch["rollout_log_probs"],
        log_prob=new,
        advantages=advantages,
        response_mask=batch["response_mask"],
        loss_agg_mode="token-mean",
        config=ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2),
    )
    assert loss.item() == pytest.approx(-(advantages.sum() / batch["response_mask"].sum()).item(), abs=1e-3)


def test_attempts_that_failed_are_rows_that_do_not_train(make: Make) -> None:
    output = make(to_task="python:verl_tasks:failing").generate_sequences(batch_of(1))
    assert len(output) == 4
    assert output.batch["response_mask"].sum() == 0
    assert output.batch["rm_scores"].sum() == 0
    assert output.batch["attention_mask"].sum(1).tolist() == [2, 2, 2, 2]


def test_a_forked_rollout_is_one_row_and_the_tape_says_what_is_left_out(make: Make, tmp_path: Path) -> None:
    manager = make(to_task="python:verl_tasks:talking", thinking=True)
    output = manager.generate_sequences(batch_of(1, count=1))
    run = rolltape.read(tmp_path / "run")
    trained = [
        sorted(sample.trained_tokens for sample in rolltape.linearize(rollout, "exact").samples())
        for rollout in run.rollouts(step=1)
    ]
    assert all(len(lengths) == 2 for lengths in trained)
    assert sorted(output.batch["response_mask"].sum(1).tolist()) == sorted(lengths[-1] for lengths in trained)
    manager.generate_sequences(batch_of(2, count=1))
    (reason,) = [
        event.data["reason"]
        for event in rolltape.read(tmp_path / "run").events()
        if event.kind == EventKind.GROUP and event.data["state"] == "done"
    ]
    left_out = sum(lengths[0] for lengths in trained)
    assert reason == f"{left_out} tokens of forked rollouts are left out: verl takes one row for each"


def test_a_validation_has_its_own_split_and_parameters_and_verls_padding_repeats_rows(
    make: Make, servers: Servers, tmp_path: Path
) -> None:
    padded, extra = pad_dataproto_to_divisor(batch_of(0, count=3, validate=True), 4)
    output = make().generate_sequences(padded)
    assert extra == 1
    assert output.non_tensor_batch["sample"][3] == output.non_tensor_batch["sample"][0]
    assert {one["temperature"] for one in servers.asked} == {0.0}
    assert len(rolltape.read(tmp_path / "run").index()) == 3
    assert {row.source for row in rolltape.read(tmp_path / "run").index()} == {"verl#val"}


def test_a_job_that_is_resumed_gets_its_step_again_from_the_tape(make: Make, servers: Servers, tmp_path: Path) -> None:
    first = make()
    first.generate_sequences(batch_of(1))
    second = first.generate_sequences(batch_of(2))
    first.generate_sequences(batch_of(3))
    first.close()
    asked = len(servers.asked)
    again = make()
    once_more = again.generate_sequences(batch_of(2))
    assert torch.equal(once_more.batch["input_ids"], second.batch["input_ids"])
    again.generate_sequences(batch_of(3))
    assert len(servers.asked) == asked
    assert len(rolltape.read(tmp_path / "run").index()) == 12


def test_a_validation_of_a_step_comes_again_also_in_a_job_that_is_resumed(make: Make, servers: Servers) -> None:
    first = make()
    validated = first.generate_sequences(batch_of(2, validate=True))
    other = first.generate_sequences(batch_of(2, validate=True))
    assert set(other.non_tensor_batch["sample"]).isdisjoint(validated.non_tensor_batch["sample"])
    first.close()
    asked = len(servers.asked)
    again = make().generate_sequences(batch_of(2, validate=True))
    assert again.non_tensor_batch["sample"].tolist() == validated.non_tensor_batch["sample"].tolist()
    assert len(servers.asked) == asked


class Queue(ModuleType):
    """verl's TransferQueue, as far as a manager writes to it."""

    def __init__(self) -> None:
        super().__init__("transfer_queue")
        self.statuses: dict[str, list[str]] = defaultdict(list)
        self.rows: dict[str, tuple[dict[str, Any], Any]] = {}

    async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.statuses[key].append(tag["status"])

    async def async_kv_batch_put(self, keys: list[str], fields: Any, tags: list[Any], partition_id: str) -> None:
        for at, key in enumerate(keys):
            self.rows[key] = ({"partition": partition_id, **tags[at]}, fields[at])


def test_the_newer_trainer_gets_all_samples_of_a_forked_rollout_by_the_queue(
    make: Make, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue()
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    prompts = get_tensordict(columns(1))
    assign_non_tensor_data(prompts, "global_steps", 5)
    manager = make(to_task="python:verl_tasks:talking", thinking=True)
    servers.global_steps = 4
    assert manager.generate_sequences(prompts) is None
    manager.wait()
    assert queue.statuses == {"uid-0": ["running", "finished"]}
    assert sorted(queue.rows) == ["uid-0_0_0", "uid-0_0_1", "uid-0_1_0", "uid-0_1_1"]
    for tag, fields in queue.rows.values():
        assert tag["partition"] == "train"
        assert (tag["global_steps"], tag["min_global_steps"], tag["max_global_steps"]) == (5, 4, 4)
        assert tag["seq_len"] == len(fields["input_ids"]) == len(fields["position_ids"])
        assert fields["rm_scores"].sum() == 1.0
        assert len(fields["rollout_log_probs"]) == len(fields["loss_mask"]) == tag["response_len"]


def test_the_newer_trainer_is_told_of_a_prompt_without_any_rollout(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    prompts = get_tensordict(columns(2))
    assign_non_tensor_data(prompts, "global_steps", 1)
    manager = make(to_task="python:verl_tasks:failing")
    manager.generate_sequences(prompts)
    manager.wait()
    assert queue.statuses == {f"uid-{n}": ["running", "failure"] for n in range(2)}
    assert queue.rows == {}


def test_a_data_proto_of_all_samples_has_a_number_of_rows_that_divides(make: Make) -> None:
    manager = make(to_task="python:verl_tasks:talking", thinking=True)
    tasks = [{"id": "talk", "environment": "message", "episode": "python:verl_tasks:talk"}]
    groups = manager._live[False].request(tasks, step=0).wait()
    data = data_proto(groups, divisor=3)
    assert len(data) == 6
    assert len(data.chunk(3)) == 3
    assert data.batch["response_mask"].sum(1).tolist()[4:] == [0, 0]
    assert data.batch["response_mask"].sum() == sum(sample.trained_tokens for sample in groups[0].samples)


def test_what_cannot_work_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    with pytest.raises(GroupsError, match=r"add \+rolltape\.run="):
        RolltapeManager(OmegaConf.create({}), None)
    with pytest.raises(GroupsError, match="'max_turn' is unknown"):
        make(max_turn=3)
    batch = batch_of(1)
    batch.non_tensor_batch["__do_sample__"] = np.ones(4, dtype=bool)
    with pytest.raises(GroupsError, match="remax"):
        make().generate_sequences(batch)


def test_without_verl_the_error_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['verl'] = None; import rolltape.integrations.verl"
    ended = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert "ImportError: rolltape.integrations.verl runs inside verl's trainer, and verl is not" in ended.stderr
    assert "pip install verl" in ended.stderr
