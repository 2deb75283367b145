"""The gateway over HTTP: the agents' APIs, the sessions' own, and what guards them."""
