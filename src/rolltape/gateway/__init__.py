"""The gateway: turns agents' API requests into recorded turns, sampled by an engine."""
