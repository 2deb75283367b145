"""Reads what can still be read of a damaged run."""
