"""Attempts on many machines: a node runs them on one, the runner here gives them out through Ray."""

from rolltape.collect.runners.ray.runner import ClusterSettings, RayRunner

__all__ = ["ClusterSettings", "RayRunner"]
