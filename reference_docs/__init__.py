"""Writes the pages of docs/reference that are made from the program: `python -m reference_docs`."""
