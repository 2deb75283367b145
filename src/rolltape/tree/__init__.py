"""Turns → the tree of a session, and why it forks."""

from rolltape.tree.abandoned import abandoned_turns
from rolltape.tree.evidence import is_version_of
from rolltape.tree.forks import forks_of
from rolltape.tree.nodes import Node
from rolltape.tree.placement import PlacedTurn, Tree, tree_of

__all__ = ["Node", "PlacedTurn", "Tree", "abandoned_turns", "forks_of", "is_version_of", "tree_of"]
