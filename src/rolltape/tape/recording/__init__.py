"""The writer's API: tapes, rollouts and sessions, and the validation of their input."""
