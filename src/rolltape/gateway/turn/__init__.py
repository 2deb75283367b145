"""One turn from request to reply: its place in the session, its prompt, what engines generate, the reply message."""
