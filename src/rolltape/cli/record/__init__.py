"""Commands that record: collect, serve, status, engine."""
