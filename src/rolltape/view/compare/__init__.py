"""The comparison of two runs, or of two parts of them: task by task, and rollout by rollout."""
