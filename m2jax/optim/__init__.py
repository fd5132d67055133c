"""Optimizers by kind of parameter: AdamW, Muon, and the schedules they follow."""

from m2jax.optim.optimizer import OptimizerConfig, learning_rates, make, norms
from m2jax.optim.schedules import ScheduleConfig

__all__ = [
  'OptimizerConfig',
  'ScheduleConfig',
  'learning_rates',
  'make',
  'norms',
]
