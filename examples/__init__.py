"""Examples that run on the shipped model."""
