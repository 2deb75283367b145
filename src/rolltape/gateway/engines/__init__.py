"""Inference engines, one file or folder each."""
