"""Tasks × attempts → rollouts: task sources, agents, environments, and the runners that carry attempts out."""

from typing import TYPE_CHECKING

from rolltape.renamed import renamed

if TYPE_CHECKING:
    from rolltape.collect.collector import Collector, Launch
    from rolltape.collect.environments.protocol import Environment
    from rolltape.collect.results import RolloutResult
    from rolltape.collect.runners.ray import ClusterSettings, PlacedEngine, RayRunner
    from rolltape.collect.settings import CollectSettings
    from rolltape.collect.sources import TaskSource, open_source
    from rolltape.collect.tasks import Task, seed_of

# Loaded on first use: reading tasks needs no gateway.
_MODULES = {
    "rolltape.collect.collector": "Collector Launch",
    "rolltape.collect.environments.protocol": "Environment",
    "rolltape.collect.results": "RolloutResult",
    "rolltape.collect.runners.ray": "ClusterSettings PlacedEngine RayRunner",
    "rolltape.collect.settings": "CollectSettings",
    "rolltape.collect.sources": "TaskSource open_source",
    "rolltape.collect.tasks": "Task seed_of",
}

__all__ = [
    "ClusterSettings",
    "CollectSettings",
    "Collector",
    "Environment",
    "Launch",
    "PlacedEngine",
    "RayRunner",
    "RolloutResult",
    "Task",
    "TaskSource",
    "open_source",
    "seed_of",
]


__getattr__ = renamed(__name__, {"Source": "TaskSource"}, lazy=_MODULES)
