"""Example task files, one for each environment, and the Python functions that they name."""
