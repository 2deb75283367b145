"""Runners carry out attempts: in this process, or on the nodes of a Ray cluster."""
