"""Commands that look after a run on disk: check, seal, prune."""
