"""Printing for all commands: tables, progress, token text."""
