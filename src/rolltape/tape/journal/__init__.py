"""SQLite journals: schema, group commit, reading."""
