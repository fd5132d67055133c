"""Tests of m2jax.observe."""
