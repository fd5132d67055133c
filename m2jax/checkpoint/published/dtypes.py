"""The dtypes in which weights are published.

Matrices, experts, embedding and norms have the dtype of the activations, in which every
layer uses them, so that the engine computes the same as with the learner's; router,
head and router biases are as trained (law 8 of the design).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m2jax import params as params_lib
from m2jax import sharding as sharding_lib
from m2jax.config import ModelConfig
from m2jax.params import Kind
from m2jax.sharding import ONE_DEVICE, Sharding

_AS_TRAINED = (Kind.ROUTER, Kind.HEAD)  # used in at least fp32


def dtype_of(name: str, leaf: Any, dtype: str | None) -> np.dtype:
  """The dtype in which a leaf, such as 'params/layers/q', is published.

  Args:
    name: the leaf's name in the variables.
    leaf: has `dtype` and `ndim`.
    dtype: dtype of the activations; None changes nothing. No leaf is widened.
  """
  own = np.dtype(leaf.dtype)
  kind, _, path = name.partition('/')
  if dtype is None or kind != 'params':
    return own
  if params_lib.kind_of(path, leaf.ndim) in _AS_TRAINED:
    return own
  wanted = jnp.dtype(dtype)
  return wanted if wanted.itemsize < own.itemsize else own


def cast(variables: Any, dtype: str | None) -> Any:
  """Variables in the dtypes in which they are published, where they are."""
  return _map(lambda name, leaf: leaf.astype(dtype_of(name, leaf, dtype)), variables)


def like(cfg: ModelConfig, sharding: Sharding = ONE_DEVICE) -> Any:
  """Shapes, dtypes and placements of a model's published variables, for a reader.

  Args:
    cfg: the model; the learner publishes with its dtype.
    sharding: the engine's sharding (`Engine.sharding`).
  """

  def one(name, leaf):
    return jax.ShapeDtypeStruct(leaf.shape, dtype_of(name, leaf, cfg.dtype))

  shapes = _map(one, params_lib.shapes(cfg))
  return sharding.shaped(shapes, sharding_lib.param_specs(cfg, sharding.rules))


def _map(f, tree):
  def one(path, leaf):
    return f(jax.tree_util.keystr(path, simple=True, separator='/'), leaf)

  return jax.tree_util.tree_map_with_path(one, tree)
