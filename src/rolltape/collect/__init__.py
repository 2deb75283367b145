"""Tasks × attempts → rollouts: task sources, agents, environments, and the runners that carry attempts out."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolltape.collect.collector import Collector, Launch
    from rolltape.collect.environments.protocol import Environment
    from rolltape.collect.results import RolloutResult
    from rolltape.collect.runners.ray import ClusterSettings, RayRunner
    from rolltape.collect.settings import CollectSettings
    from rolltape.collect.sources import TaskSource, open_source
    from rolltape.collect.tasks import Task, seed_of

# Loaded when first used: reading tasks needs no gateway.
_HOMES = {
    "ClusterSettings": "rolltape.collect.runners.ray",
    "CollectSettings": "rolltape.collect.settings",
    "Collector": "rolltape.collect.collector",
    "Environment": "rolltape.collect.environments.protocol",
    "Launch": "rolltape.collect.collector",
    "RayRunner": "rolltape.collect.runners.ray",
    "RolloutResult": "rolltape.collect.results",
    "Task": "rolltape.collect.tasks",
    "TaskSource": "rolltape.collect.sources",
    "open_source": "rolltape.collect.sources",
    "seed_of": "rolltape.collect.tasks",
}

__all__ = [
    "ClusterSettings",
    "CollectSettings",
    "Collector",
    "Environment",
    "Launch",
    "RayRunner",
    "RolloutResult",
    "Task",
    "TaskSource",
    "open_source",
    "seed_of",
]


def __getattr__(name: str) -> Any:
    if name == "Source":
        warnings.warn("rolltape.collect.Source is now TaskSource", DeprecationWarning, stacklevel=2)
        name = "TaskSource"
    if name not in _HOMES:
        raise AttributeError(f"module 'rolltape.collect' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
