"""Tapes → trainers: whole groups as they complete, each once, and room for collection to go on."""

from rolltape.supply.group import Group
from rolltape.supply.room import Room
from rolltape.supply.stream import GroupStream, Skipped, groups

__all__ = ["Group", "GroupStream", "Room", "Skipped", "groups"]
