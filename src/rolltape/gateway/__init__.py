"""Agents' requests become turns: gateway, sessions, wire formats and engines."""
