"""Turns → the tree of a session, and why it forks."""

from rolltape.tree.arrival import Arrivals, arrivals_of
from rolltape.tree.forks import forks_of
from rolltape.tree.placement import PlacedTurn, Tree, tree_of
from rolltape.tree.places import Node

__all__ = ["Arrivals", "Node", "PlacedTurn", "Tree", "arrivals_of", "forks_of", "tree_of"]
