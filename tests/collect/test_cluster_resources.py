"""What attempts and engines take of a Ray cluster: shipped modules, reserved processors, engines on nodes with GPUs."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import ray

from clusters import Nodes, cluster_at, collected_by, wait_until
from collecting import SUMS, finished_per_task, instant, rollouts, task_file
from commands import Cli
from rolltape.collect.runners.ray import PlacedEngine
from rolltape.errors import CollectError
from rolltape.records.rollout import Status
from rolltape.tiny import shipped_model
from scripted_engine import Step

SERVER = f"{sys.executable} -m rolltape.cli engine --host {{host}} --port {{port}} --api-key secret"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with cluster_at(tmp_path_factory.mktemp("cluster")) as nodes:
        nodes.grow_to(2, num_gpus=1)
        yield nodes


async def test_no_more_attempts_run_at_once_than_there_is_room_reserved_for(cluster: Nodes, tmp_path: Path) -> None:
    async with instant(lambda asked: Step("4", token_delay_s=0.2)) as engine:
        await collected_by(
            cluster, task_file(tmp_path), tmp_path / "run", engine, group_size=2, max_concurrent=8, cluster={"cpus": 1}
        )
    assert engine.most_at_once == 2, "two nodes with one processor each"
    assert finished_per_task(tmp_path / "run") == {task["id"]: 2 for task in SUMS}
    with ray.init(address=cluster.address, logging_level=logging.ERROR):
        wait_until(lambda: cast("Any", ray).available_resources().get("CPU") == 2)


async def test_a_folder_of_modules_is_shipped_to_the_nodes(
    cluster: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, elsewhere = tmp_path / "shipped", tmp_path / "elsewhere"
    shipped.mkdir()
    elsewhere.mkdir()
    (shipped / "only_shipped.py").write_text("import os\n\ndef agent(assignment):\n    return os.environ['ANSWER']\n")
    monkeypatch.chdir(elsewhere)
    env = {"working_dir": str(shipped), "env_vars": {"ANSWER": "2"}}
    results = await collected_by(
        cluster,
        task_file(tmp_path, SUMS[:1]),
        tmp_path / "run",
        agent="python:only_shipped:agent",
        group_size=2,
        cluster={"runtime_env": env},
    )
    assert [(one.status, one.reward) for one in results] == [(Status.FINISHED, 1.0)] * 2
    with pytest.raises(CollectError, match="Ray rejects the runtime_env"):
        await collected_by(
            cluster, tmp_path / "tasks.jsonl", tmp_path / "other", cluster={"runtime_env": {"working_dir": 3}}
        )


async def test_engines_are_started_on_nodes_with_gpus_and_end_with_the_collection(
    cluster: Nodes, tmp_path: Path
) -> None:
    engine = PlacedEngine("sglang", SERVER, copies=2)
    results = await collected_by(
        cluster,
        task_file(tmp_path),
        tmp_path / "run",
        group_size=2,
        model=str(shipped_model()),
        engine_key="secret",
        cluster={"engine": engine},
    )
    assert [one.status for one in results] == [Status.FINISHED] * 8
    assert all(turn.sampled_ids.size for one in rollouts(tmp_path / "run") for turn in one.turns)
    wait_until(lambda: not servers())


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (PlacedEngine("sglang", "sh -c 'echo no such model {host} {port}; exit 3'"), "exit code 3.*no such model"),
        (PlacedEngine("sglang", "no-such-program {host} {port}"), "no-such-program"),
        (PlacedEngine("sglang", SERVER, gpus=2, start_s=1.0), "found no node after 1 s; the cluster has 2 GPUs in all"),
    ],
)
async def test_an_engine_that_cannot_be_started_is_an_error_that_says_why(
    engine: PlacedEngine, problem: str, cluster: Nodes, tmp_path: Path
) -> None:
    with pytest.raises(CollectError, match=problem):
        await collected_by(
            cluster, task_file(tmp_path), tmp_path / "run", model=str(shipped_model()), cluster={"engine": engine}
        )
    assert not servers()


def servers() -> list[str]:
    """The engines that this test has started."""
    mark = b"-m\0rolltape.cli\0engine\0"
    own = [entry for entry in Path("/proc").glob("[0-9]*") if mark in _read(entry / "cmdline")]
    return [entry.name for entry in own if str(Path.cwd()).encode() in _read(entry / "cmdline")]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--ray-cpus", "1"), "--ray-cpus needs --runner ray"),
        (("--runner", "ray", "--ray-memory", "much"), "--ray-memory much: give bytes, or a number with k, m, g or t"),
        (("--runner", "ray", "--ray-runtime-env", "{"), "--ray-runtime-env: not JSON"),
        (("--runner", "ray", "--ray-runtime-env", "missing.json"), "missing.json: cannot be read"),
        (("--runner", "ray", "--ray-working-dir", "missing"), "--ray-working-dir missing: there is no such folder"),
        (("--runner", "ray", "--ray-engines", "2"), "--ray-engines needs --ray-engine"),
        (("--runner", "ray", "--ray-engine", "vllm:vllm serve x"), "has no {host} and no {port}"),
        (("--runner", "ray", "--ray-engine", "vllm:http://a"), "starts no engine; give sglang:COMMAND or vllm:COMMAND"),
    ],
)
def test_flags_that_make_no_sense_are_named(flags: tuple[str, ...], problem: str, tmp_path: Path, cli: Cli) -> None:
    failed = cli("collect", task_file(tmp_path), "--run", tmp_path / "run", *flags)
    assert failed.code == 2
    assert problem in " ".join(failed.err.split())
