"""Optimizers by kind of parameter: AdamW, Muon, and the schedules they follow."""

from m2jax.optim.kinds import Kind, classify, kind_of
from m2jax.optim.optimizer import OptimizerConfig, learning_rates, make, norms
from m2jax.optim.schedules import ScheduleConfig

__all__ = [
  'Kind',
  'OptimizerConfig',
  'ScheduleConfig',
  'classify',
  'kind_of',
  'learning_rates',
  'make',
  'norms',
]
