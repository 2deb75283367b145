"""The shipped model learns with GRPO, on a CPU, from rollouts that Rolltape collects: see README.md."""
