"""Attempts on the nodes of a Ray cluster: nodes run them on their machines, and the runner here gives them out."""

from rolltape.collect.runners.ray.runner import RayRunner, connect_to_cluster
from rolltape.collect.runners.ray.settings import ClusterSettings, PlacedEngine

__all__ = ["ClusterSettings", "PlacedEngine", "RayRunner", "connect_to_cluster"]
