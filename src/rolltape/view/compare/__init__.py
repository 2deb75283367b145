"""Two runs, or two parts of them, compared: task by task, and rollout by rollout."""
