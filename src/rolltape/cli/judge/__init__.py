"""Commands that reward and filter rollouts: score, filter."""
