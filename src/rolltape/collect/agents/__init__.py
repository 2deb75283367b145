"""Agents: what attempts a task, through a session of the gateway."""

from rolltape.collect.agents.naming import AGENTS, agent_named
from rolltape.collect.agents.protocol import Agent, Assignment, Connection, Outcome, StepRecord
from rolltape.collect.agents.workspace import discard

__all__ = ["AGENTS", "Agent", "Assignment", "Connection", "Outcome", "StepRecord", "agent_named", "discard"]
