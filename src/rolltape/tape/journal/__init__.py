"""SQLite journals: their format, group commit, and reading."""
