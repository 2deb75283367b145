"""Where tasks come from: files, standard input, datasets, functions → a checked sequence of tasks."""

from rolltape.collect.sources.checking import Check
from rolltape.collect.sources.opening import open_source
from rolltape.collect.sources.source import Source

__all__ = ["Check", "Source", "open_source"]
