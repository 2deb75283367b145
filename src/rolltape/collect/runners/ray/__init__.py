"""Attempts on the nodes of a Ray cluster: a node runs them on its machine, and the runner here gives them out."""

from rolltape.collect.runners.ray.runner import ClusterSettings, RayRunner

__all__ = ["ClusterSettings", "RayRunner"]
