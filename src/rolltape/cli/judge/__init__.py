"""Commands that judge rollouts: score, filter, tag, note."""
