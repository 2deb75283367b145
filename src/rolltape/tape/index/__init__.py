"""The index: a database of what a run holds, derived from its journals and shards."""
