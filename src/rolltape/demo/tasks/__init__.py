"""Example task files, one for each environment, and what they name in Python."""
