"""Variables without a compilation.

Random initial values by jax take seconds to compile for every model, more than most
tests of a small model otherwise do.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from m2jax import params as params_lib
from m2jax.config import ModelConfig


def variables(
  cfg: ModelConfig, seed: int, noise: float = 0.0, bias: float = 0.0
) -> dict[str, Any]:
  """Random {'params', 'router'} of a model, of numpy's generator.

  Args:
    cfg: the model.
    seed: of the values.
    noise: standard deviation added to every parameter, norms included.
    bias: standard deviation of the router biases.
  """
  rng = np.random.default_rng(seed)

  def parameter(_, param: params_lib.Param, stacked):
    shape = (*stacked, *param.shape(cfg))
    if param.init == 'ones':
      values = np.ones(shape)
    else:
      values = params_lib.INITS[param.init](shape, cfg) * rng.normal(size=shape)
    return jnp.asarray(values + noise * rng.normal(size=shape), cfg.param_dtype)

  dtype = params_lib.shapes(cfg)['router']['layers'].dtype
  router = params_lib.router_tree(
    cfg, lambda shape: jnp.asarray(bias * rng.normal(size=shape), dtype)
  )
  return {'params': params_lib.tree(cfg, parameter), 'router': router}
