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

# Loaded on first use: reading tasks needs no gateway.
_MODULES = {
    "rolltape.collect.collector": "Collector Launch",
    "rolltape.collect.environments.protocol": "Environment",
    "rolltape.collect.results": "RolloutResult",
    "rolltape.collect.runners.ray": "ClusterSettings RayRunner",
    "rolltape.collect.settings": "CollectSettings",
    "rolltape.collect.sources": "TaskSource open_source",
    "rolltape.collect.tasks": "Task seed_of",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

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
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rolltape.collect' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
