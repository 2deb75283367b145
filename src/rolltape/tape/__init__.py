"""The run directory: a durable journal per writer, sealed shards, and readers that see them as one run."""
