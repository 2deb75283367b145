"""The writer's API: tapes, rollouts, sessions, and the validation of what they are given."""
