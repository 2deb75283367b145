"""Runners run attempts: in this process (`local`), or on the nodes of a Ray cluster (`ray`)."""
