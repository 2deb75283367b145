"""Parquet shards of a run: sealing, publishing, pruning and reading them."""
