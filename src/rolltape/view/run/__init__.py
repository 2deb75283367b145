"""Answers about a run: its overview, its rollouts and its tasks."""
