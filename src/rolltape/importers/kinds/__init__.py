"""One module per kind of source: what it looks like, and the rollouts in it."""
