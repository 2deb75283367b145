"""What is read of a damaged run."""
