"""Optimizers by kind of parameter, and the schedules that they follow."""

from m2jax.optim.adam import AdamConfig
from m2jax.optim.gnmr import GnmrConfig
from m2jax.optim.hyperball import HyperballConfig
from m2jax.optim.muon import MuonConfig
from m2jax.optim.nor_muon import NorMuonConfig
from m2jax.optim.optimizer import (
  ByKind,
  OptimizerConfig,
  describe,
  initializer,
  learning_rates,
  make,
)
from m2jax.optim.rule import MatrixRule, UpdateRule
from m2jax.optim.schedules import ScheduleConfig
from m2jax.optim.sso import MuonSphereConfig, SsoConfig

__all__ = [
  'AdamConfig',
  'ByKind',
  'GnmrConfig',
  'HyperballConfig',
  'MatrixRule',
  'MuonConfig',
  'MuonSphereConfig',
  'NorMuonConfig',
  'OptimizerConfig',
  'ScheduleConfig',
  'SsoConfig',
  'UpdateRule',
  'describe',
  'initializer',
  'learning_rates',
  'make',
]
