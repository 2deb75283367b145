"""A real Ray cluster on this machine, each of its nodes with a disk of its own as far as Rolltape can tell."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from collecting import by
from rolltape.collect.collector import Collector
from rolltape.collect.results import RolloutResult
from rolltape.collect.runners.ray import ClusterSettings, RayRunner
from rolltape.collect.settings import CollectSettings
from rolltape.tape.recording.tape import open_tape
from scripted_engine import ScriptedEngine


class Nodes:
    """The nodes of a cluster whose head does no work."""

    def __init__(self, cluster: Cluster, disks: Path) -> None:
        self._cluster = cluster
        self._disks = disks
        self._held: list[tuple[Any, Path]] = []
        self._made = 0

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def grow_to(self, count: int, **resources: Any) -> None:
        while len(self._held) < count:
            disk = self._disks / str(self._made)
            disk.mkdir()
            self._made += 1
            self._held.append((self._cluster.add_node(num_cpus=1, env_vars={"TMPDIR": str(disk)}, **resources), disk))

    def kill_one(self) -> None:
        """Kill a node and all that runs on it; what is on its disk stays there, and nobody reads it."""
        node, _ = self._held.pop(0)
        self._cluster.remove_node(node, allow_graceful=False)

    def processes(self) -> list[int]:
        """The processes of Rolltape's actors in this cluster."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, StopIteration):
                if folder.name.isdecimal() and b"ray::ClusterNode" in (folder / "cmdline").read_bytes():
                    lines = (folder / "status").read_text().splitlines()
                    parent = next(line.split()[1] for line in lines if line.startswith("PPid:"))
                    if self.address.encode() in Path("/proc", parent, "cmdline").read_bytes():
                        found.append(int(folder.name))
        return found

    def journals(self) -> list[Path]:
        """Those on the disks of nodes that live."""
        return [path for _, disk in self._held for path in disk.glob("rolltape/*/journals/*.sqlite")]


@contextlib.contextmanager
def cluster_at(folder: Path) -> Iterator[Nodes]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    disks = folder / "disks"
    disks.mkdir()
    head = {
        "num_cpus": 0,
        "include_dashboard": False,
        "object_store_memory": 80_000_000,
        # A node that is gone refuses connections at once; one that is slow has three times this timeout.
        "_system_config": {
            "health_check_period_ms": 1_000,
            "health_check_timeout_ms": 10_000,
            "health_check_failure_threshold": 3,
        },
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield Nodes(cluster, disks)
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


async def collected_by(
    nodes: Nodes,
    source: Path | str,
    run: Path,
    engine: ScriptedEngine | None = None,
    *,
    resume: bool = False,
    publish: str | None = None,
    folder: Path | None = None,
    cluster: dict[str, Any] | None = None,
    on_results: Callable[[list[RolloutResult]], None] = lambda results: None,
    **settings: Any,
) -> list[RolloutResult]:
    """Collect all of it on the cluster; the results as they were told."""
    if engine is not None:
        settings |= by(engine)
    results: list[RolloutResult] = []

    def told(some: list[RolloutResult]) -> None:
        results.extend(some)
        on_results(some)

    with open_tape(run) as tape:
        how = CollectSettings(source=str(source), **settings)
        on_nodes = None if folder is None else str(folder)
        runner = RayRunner(how, tape, ClusterSettings(nodes.address, publish, on_nodes, **(cluster or {})))
        await Collector(how, tape, resume=resume, runner=runner).run(lambda launch: None, told)
    return results


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)
