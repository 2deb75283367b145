"""Environments of other projects. Each module has the name of its project, and imports it."""
