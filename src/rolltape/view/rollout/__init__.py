"""What the page asks about one rollout: its turns, messages, tokens and group."""
