"""Parquet shards: seal, publish, prune, read."""
