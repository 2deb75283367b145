"""Commands that record: demo, collect, serve, status, import, doctor, engine."""
