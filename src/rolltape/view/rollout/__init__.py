"""Answers about one rollout: its turns, messages, tokens and group."""
