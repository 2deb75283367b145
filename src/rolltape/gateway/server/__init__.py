"""The gateway's HTTP server: the agents' APIs, the session API, and access checks."""
