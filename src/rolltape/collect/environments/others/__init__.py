"""Environments of other projects, each in a module named as the project. Each imports its project."""
