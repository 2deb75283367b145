"""What the page asks about a run: its overview and its list of rollouts."""
