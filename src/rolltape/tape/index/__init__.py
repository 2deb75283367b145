"""What a run holds."""
