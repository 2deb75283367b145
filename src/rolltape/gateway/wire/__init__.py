"""The APIs that agents use, in one or a few files each."""
