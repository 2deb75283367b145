"""On a cluster: the same rollouts as on one machine, and a lost node costs only what it had not brought to its end."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import rolltape
from bwrap import needs_bwrap
from clusters import Nodes, cluster_at, collected_by, wait_until
from collecting import EXAMPLES, SUMS, collected, command, finished_per_task, instant, rollouts, task_file
from commands import Cli
from podman import containers, needs_podman, podman
from rolltape.collect.results import RolloutResult
from rolltape.collect.sandboxes import ContainerSettings, SandboxKind
from rolltape.errors import CollectError
from rolltape.records.rollout import Rollout, Status
from rolltape.records.sample import Sample
from rolltape.samples import linearize
from rolltape.tape.recording.tape import open_tape
from scripted_engine import Step
from taped import array

GROUP = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with cluster_at(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def nodes(cluster: Nodes) -> Nodes:
    cluster.grow_to(3)
    return cluster


def slow(asked: object) -> Step:
    return Step("4", token_delay_s=0.4)


def ids(run: Path) -> set[str]:
    return {row.id for row in rolltape.read(run).index()}


@pytest.mark.parametrize("name", ["problem", "message", "game"])
async def test_a_cluster_gives_the_same_rollouts_as_one_machine(name: str, nodes: Nodes, tmp_path: Path) -> None:
    source = EXAMPLES / f"{name}.jsonl"
    there = await collected_by(nodes, source, tmp_path / "there" / "run", group_size=2, max_concurrent=4)
    here = await collected(source, tmp_path / "here" / "run", group_size=2, max_concurrent=4)
    assert sorted(told(there)) == sorted(told(here))
    ours, theirs = ({one.id: one for one in rollouts(tmp_path / side / "run")} for side in ("here", "there"))
    assert ours.keys() == theirs.keys()
    for own, other in ((ours[one], theirs[one]) for one in ours):
        assert [array(turn.prompt_ids) for turn in own.turns] == [array(turn.prompt_ids) for turn in other.turns]
        assert [array(turn.sampled_ids) for turn in own.turns] == [array(turn.sampled_ids) for turn in other.turns]
        assert linearize(own).ledger.totals() == linearize(other).ledger.totals()
    assert nodes.journals() == [], "what is published and closed leaves no journal on a node"


def told(results: list[RolloutResult]) -> list[tuple[object, ...]]:
    return [(one.rollout, one.try_index, one.attempt, one.seat, one.status, one.reward, one.turns) for one in results]


async def test_attempts_run_on_several_nodes_and_rewards_of_comparison_land_where_they_belong(
    nodes: Nodes, tmp_path: Path
) -> None:
    source = EXAMPLES / "preference.jsonl"
    there = await collected_by(nodes, source, tmp_path / "there" / "run", group_size=4, max_concurrent=6)
    here = await collected(source, tmp_path / "here" / "run", group_size=4)
    assert {one.rollout: one.reward for one in there} == {one.rollout: one.reward for one in here}
    recorded = {one.id: one.reward for one in rollouts(tmp_path / "there" / "run")}
    assert recorded == {one.rollout: one.reward for one in here}
    writers = {event.writer for event in rolltape.read(tmp_path / "there" / "run").events()}
    assert len(writers) == 4, "three nodes and the collector"


async def test_a_node_killed_in_the_middle_costs_only_its_unfinished_attempts(
    nodes: Nodes, tmp_path: Path, cli: Cli
) -> None:
    run, told_of, kills = tmp_path / "run", Counter[str](), 0

    def on_results(results: list[RolloutResult]) -> None:
        nonlocal kills
        told_of.update(one.rollout for one in results)
        if told_of and not kills:
            kills += 1
            nodes.kill_one()

    async with instant(slow) as engine:
        results = await collected_by(
            nodes, task_file(tmp_path), run, engine, group_size=40, max_concurrent=12, on_results=on_results
        )
    assert kills == 1
    assert finished_per_task(run) == {task["id"]: 40 for task in SUMS}
    assert set(told_of.values()) == {1}, "each attempt is told of once"
    assert len(results) == 160
    again = [one for one in rollouts(run) if one.head.try_index]
    assert again, "what the node had not published was run elsewhere"
    assert len(again) <= 12 + 64
    async with instant() as engine:
        await collected(task_file(tmp_path), tmp_path / "other" / "run", engine, group_size=40)
    assert ids(run) == ids(tmp_path / "other" / "run")
    assert cli("check", run).code == 0


async def test_what_had_ended_when_a_nodes_process_died_is_not_run_again(nodes: Nodes, tmp_path: Path) -> None:
    run, kills = tmp_path / "run", 0

    def on_results(results: list[RolloutResult]) -> None:
        nonlocal kills
        if results and not kills:
            kills += 1
            os.kill(nodes.processes()[0], signal.SIGKILL)

    async with instant(slow) as engine:
        results = await collected_by(
            nodes, task_file(tmp_path), run, engine, group_size=40, max_concurrent=12, on_results=on_results
        )
    assert len({one.rollout for one in results}) == len(results) == 160
    held = rollouts(run)
    finished = Counter(one.id for one in held if one.status is Status.FINISHED)
    # Only an attempt whose end the process could not tell of before it died may have ended twice.
    assert sum(finished.values()) <= 160 + 3
    assert len(finished) == 160
    lost = [one for one in held if one.status is Status.LOST]
    assert all(any(other.id == one.id and other.head.try_index > one.head.try_index for other in held) for one in lost)
    assert nodes.journals() == []


def test_a_collector_killed_and_resumed_ends_with_every_attempt_once(nodes: Nodes, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    arguments = [EXAMPLES / "problem.jsonl", "--run", run, "-g", GROUP, "--max-concurrent", 6, "--json"]
    arguments += ["--runner", "ray", "--ray-address", nodes.address]
    process = command(*arguments)
    assert process.stdout is not None
    while json.loads(process.stdout.readline())["event"] != "rollout":
        pass
    process.kill()
    process.communicate()
    process = command(*arguments, "--resume")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    launch, *_, end = (json.loads(line) for line in out.splitlines())
    assert launch["done_before"] > 0
    assert end["whole"]
    wanted = {json.loads(line)["id"]: GROUP for line in (EXAMPLES / "problem.jsonl").read_text().splitlines()}
    assert finished_per_task(run) == wanted
    assert cli("check", run).code == 0


def test_interrupted_it_leaves_a_whole_run(nodes: Nodes, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    arguments = [EXAMPLES / "problem.jsonl", "--run", run, "-g", 20, "--max-concurrent", 3, "--json"]
    process = command(*arguments, "--runner", "ray", "--ray-address", nodes.address)
    assert process.stdout is not None
    while json.loads(process.stdout.readline())["event"] != "rollout":
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert json.loads(out.splitlines()[-1])["whole"] is False
    statuses = {one.status for one in rollouts(run)}
    assert Status.FINISHED in statuses
    assert statuses <= {Status.FINISHED, Status.FAILED}
    assert nodes.journals() == []
    assert cli("check", run).code == 0


async def test_programs_run_on_nodes_in_sandboxes_and_their_logs_come_back(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_bwrap()
    monkeypatch.setenv("ROLLTAPE_TEST_PASSED", "on")
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, sys, urllib.request\ntold = json.load(sys.stdin)\n"
        "body = json.dumps({'model': told['model'], 'messages': told['messages']}).encode()\n"
        "request = urllib.request.Request(told['openai_base_url'] + '/chat/completions', body)\n"
        "urllib.request.urlopen(request).read()\nprint(1 + int(told['task']['id'].removeprefix('sum-')))\n"
        "print(os.getcwd(), os.getuid(), os.environ['ROLLTAPE_TEST_PASSED'], file=sys.stderr)\n"
    )
    run = tmp_path / "run"
    async with instant() as engine:
        results = await collected_by(
            nodes,
            task_file(tmp_path),
            run,
            engine,
            group_size=2,
            agent=f"command:python3 {script}",
            sandbox=SandboxKind.BWRAP,
            pass_env=("ROLLTAPE_TEST_PASSED",),
        )
    assert {(one.status, one.reason) for one in results} == {(Status.FINISHED, None)}
    assert {one.reward for one in results} == {1.0}
    for one in results:
        assert (run / "logs" / one.rollout / "stderr.txt").read_text() == "/workspace 1000 on\n"


async def test_programs_run_on_nodes_in_containers_which_are_removed(nodes: Nodes, tmp_path: Path) -> None:
    image = needs_podman()
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, sys, urllib.request\ntold = json.load(sys.stdin)\n"
        "body = json.dumps({'model': told['model'], 'messages': told['messages']}).encode()\n"
        "request = urllib.request.Request(told['openai_base_url'] + '/chat/completions', body)\n"
        "urllib.request.urlopen(request).read()\nopen('answer.txt', 'w').write('4')\nprint(os.getcwd(), os.getuid())\n"
    )
    tasks = [{"id": f"t{n}", "prompt": "?", "check": {"command": "grep -q 4 answer.txt"}} for n in range(2)]
    async with instant() as engine:
        results = await collected_by(
            nodes,
            task_file(tmp_path, tasks),
            tmp_path / "run",
            engine,
            group_size=2,
            agent=f"command:python3 {script}",
            sandbox=SandboxKind.PODMAN,
            container=ContainerSettings(image=image, workdir="/srv", user="0"),
            # Nodes have their environment from whoever started them, before podman was set up here.
            pass_env=("CONTAINERS_CONF",),
        )
    assert {(one.status, one.reason, one.reward) for one in results} == {(Status.FINISHED, None, 1.0)}
    for one in results:
        assert (tmp_path / "run" / "logs" / one.rollout / "stdout.txt").read_text() == "/srv 0\n"
    assert not [one for one in containers("rolltape.run") if str(tmp_path) in podman("inspect", one).stdout]


async def test_what_is_published_elsewhere_is_part_of_the_run(nodes: Nodes, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    async with instant() as engine:
        await collected_by(
            nodes, task_file(tmp_path), tmp_path / "run", engine, group_size=2, publish=f"file://{elsewhere}"
        )
    assert finished_per_task(tmp_path / "run") == {task["id"]: 2 for task in SUMS}
    assert ids(elsewhere) == ids(tmp_path / "run")


async def test_nodes_that_do_not_see_the_run_are_named(nodes: Nodes, tmp_path: Path) -> None:
    with pytest.raises(CollectError, match=r"no node of the cluster can run attempts: node .* cannot find the run"):
        await collected_by(nodes, task_file(tmp_path), tmp_path / "run", publish="memory://nobody-else-sees-this")


async def test_an_attempt_that_takes_its_node_down_each_time_is_given_up(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os\n\n\ndef agent(assignment):\n"
        "    if assignment.task['id'] == 'sum-2':\n        os.kill(os.getpid(), 9)\n    return '3'\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        async with instant() as engine:
            results = await collected_by(
                nodes,
                task_file(tmp_path),
                tmp_path / "run",
                engine,
                group_size=1,
                max_concurrent=1,
                agent="python:deadly:agent",
            )
    by_task = {one.task: one for one in results}
    assert by_task["sum-2"].status is Status.FAILED
    assert by_task["sum-2"].reason == "3 nodes were lost while they ran it"
    recorded = rolltape.read(tmp_path / "run").rollout(by_task["sum-2"].rollout)
    assert (recorded.status, recorded.outcome.reason) == (Status.FAILED, "3 nodes were lost while they ran it")
    assert {one.status for task, one in by_task.items() if task != "sum-2"} == {Status.FINISHED}


async def test_a_try_that_a_process_before_still_holds_on_the_node_is_followed_by_another(
    nodes: Nodes, tmp_path: Path
) -> None:
    folder, run = tmp_path / "journals", tmp_path / "run"
    async with instant() as engine:
        await collected(task_file(tmp_path), tmp_path / "other" / "run", engine, group_size=1)
        await collected_by(nodes, task_file(tmp_path), run, engine, group_size=1, limit=1, folder=folder)
        (there,) = folder.iterdir()
        with open_tape(there, "run") as before:
            for one in rollouts(tmp_path / "other" / "run"):
                fields = ("task_id", "task", "attempt", "source", "model", "agent")
                before.rollout(**{name: getattr(one.head, name) for name in fields}, step=1, try_index=0)
            results = await collected_by(nodes, task_file(tmp_path), run, engine, group_size=1, step=1, folder=folder)
    assert {(one.task, one.status, one.try_index) for one in results} == {
        (task["id"], Status.FINISHED, 1) for task in SUMS
    }


async def test_a_connection_that_a_program_has_to_the_cluster_stays_its_own(nodes: Nodes, tmp_path: Path) -> None:
    ray.init(address=nodes.address, log_to_driver=False)
    try:
        async with instant() as engine:
            await collected_by(nodes, task_file(tmp_path), tmp_path / "run", engine, group_size=1)
        assert ray.is_initialized()
        wait_until(lambda: nodes.processes() == [])
    finally:
        ray.shutdown()
    assert finished_per_task(tmp_path / "run") == {task["id"]: 1 for task in SUMS}


def test_without_a_cluster_it_says_so(tmp_path: Path, cli: Cli) -> None:
    run = cli("collect", task_file(tmp_path), "--run", tmp_path / "run", "--runner", "ray", "--ray-address", "[::1]:1")
    assert run.code != 0
    assert "no Ray cluster at" in run.err


async def test_groups_of_a_cluster_feed_a_trainer_while_it_collects(nodes: Nodes, tmp_path: Path) -> None:
    source, run = task_file(tmp_path), tmp_path / "run"
    given: dict[str, list[Sample]] = {}
    async with instant() as engine:
        with open_tape(run) as trainer:
            shared = str(tmp_path / "shared")
            collecting = asyncio.ensure_future(collected_by(nodes, source, run, engine, group_size=2, publish=shared))
            async for group in trainer.groups(step=0, poll_s=0.05):
                assert (len(group.rollouts), group.missing, group.again) == (2, 0, False)
                assert group.id not in given
                given[group.id] = list(group.samples)
                group.done()
            await collecting
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts(run):
        groups.setdefault(rollout.head.group, []).append(rollout)
    assert given.keys() == groups.keys()
    assert len(given) == 4
    for group_id, members in groups.items():
        read = list(rolltape.samples_of_group(members))
        assert [one.advantage for one in given[group_id]] == [one.advantage for one in read]
        assert [array(one.ids) for one in given[group_id]] == [array(one.ids) for one in read]
        assert [array(one.trained_mask) for one in given[group_id]] == [array(one.trained_mask) for one in read]
