"""One module per kind of source: it recognizes the kind, and reads its rollouts."""
