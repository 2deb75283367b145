"""Where tasks come from: files, standard input, datasets, functions → a checked sequence of tasks."""

from rolltape.collect.sources.kept import Source
from rolltape.collect.sources.opening import open_source
from rolltape.collect.sources.strict import Check

__all__ = ["Check", "Source", "open_source"]
