"""A small model and batches of trees for the tests of sharding.

Every size that is split divides by 8 or 4, and no two sizes are alike, so that a shape
in a compiled program tells what it is.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from m2jax import forest
from m2jax.config import ModelConfig
from m2jax.optim import (
  HyperballConfig,
  MuonConfig,
  MuonSphereConfig,
  NorMuonConfig,
  OptimizerConfig,
  SsoConfig,
)

ROW_TOKENS = 48


def config(**changes) -> ModelConfig:
  base = ModelConfig(
    vocab_size=88,
    num_layers=2,
    embed_dim=40,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    rotary_dim=2,
    num_experts=8,
    experts_per_token=3,
    expert_dim=24,
    rope_theta=100.0,
    num_mtp_modules=1,
    dtype='float64',
    param_dtype='float64',
  )
  return dataclasses.replace(base, **changes)


def optimizer(matrices: str) -> OptimizerConfig:
  """`matrices` updates the hidden matrices, Adam the rest; all at one rate.

  SSO's tolerance is at float64's precision: it decides how many evaluations there are.
  """
  return OptimizerConfig(
    name=matrices,
    muon=MuonConfig(learning_rate=1e-3),
    nor_muon=NorMuonConfig(learning_rate=1e-3, split_heads=True),
    hyperball=HyperballConfig(learning_rate=1e-3),
    sso=SsoConfig(learning_rate=1e-3, tolerance=1e-9),
    muon_sphere=MuonSphereConfig(learning_rate=1e-3),
  )


def batch(seed: int, rows: int) -> forest.Forest:
  """Rows of one random tree each, deep enough to lie across all shards of a row."""
  rng = np.random.default_rng(seed)
  vocab = config().vocab_size

  def row():
    stem = rng.integers(1, vocab, 9)
    samples = [_sample(rng, stem, vocab) for _ in range(3)]
    return forest.merge(samples, row_tokens=ROW_TOKENS, rows=1, row_terms=ROW_TOKENS)

  trees = [row() for _ in range(rows)]
  return jax.tree.map(lambda *parts: np.concatenate(parts), *trees)


def _sample(rng, stem, vocab) -> forest.Sample:
  tail = rng.integers(1, vocab, rng.integers(4, 13))
  weights = rng.random(len(tail) + 4).astype(np.float32)
  tokens = np.concatenate([stem, tail])
  return forest.Sample(tokens, len(stem) - 4, weights=weights)
