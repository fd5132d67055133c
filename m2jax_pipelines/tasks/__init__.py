"""Kinds of tasks beside those of m2jax: entry points of the group `m2jax.tasks`."""
