"""Agents: programs that solve tasks through the gateway (`agents.agent`)."""

from m2jax.agents.agent import (
  Agent,
  AgentConfig,
  AuthorConfig,
  Endpoint,
  Outcome,
  make,
  open_task,
  run_within,
)

KINDS = 'blackbox', 'mixed', 'perturbed', 'whitebox'  # modules that are kinds

__all__ = [
  'KINDS',
  'Agent',
  'AgentConfig',
  'AuthorConfig',
  'Endpoint',
  'Outcome',
  'make',
  'open_task',
  'run_within',
]
