"""Optimizers by kind of parameter, and the schedules that they follow."""

from m2jax.optim.adam import AdamConfig
from m2jax.optim.muon import MuonConfig
from m2jax.optim.optimizer import (
  ByKind,
  OptimizerConfig,
  describe,
  learning_rates,
  make,
)
from m2jax.optim.rule import UpdateRule
from m2jax.optim.schedules import ScheduleConfig

__all__ = [
  'AdamConfig',
  'ByKind',
  'MuonConfig',
  'OptimizerConfig',
  'ScheduleConfig',
  'UpdateRule',
  'describe',
  'learning_rates',
  'make',
]
