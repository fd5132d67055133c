"""What agents are trained and judged on: a task, its workspace and its verifier."""
