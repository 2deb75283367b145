"""One turn from request to reply: its place in the session, its prompt, its sampled ids, its reply message."""
