"""The main job's learner in block FP8 with GNMR, as its config lines set it."""

from __future__ import annotations

import numpy as np
import pytest

from configs import forge
from experiments import common
from m2jax.forge.config import ForgeConfig
from m2jax.optim import gnmr
from m2jax.optim import optimizer as optimizer_lib
from m2jax.rl import learner
from m2jax.train import step as train_step
from tests import quick
from tests.rl import test_learner


def built(**controller):
  settings = forge.get_config()
  settings.model.matmuls.kind = 'block_fp8'
  settings.rl.optimizer.gnmr.update(controller)
  return common.build(ForgeConfig, settings)


@pytest.mark.long
def test_updates_with_a_route():
  """Two versions: the first one's norms choose a layer that recovers in the second."""
  config = built(max_active=1, alpha=0.9)
  cfg, rl = config.model, config.rl
  optimizer = optimizer_lib.make(rl.optimizer, cfg)
  state = train_step.init_state(quick.variables(cfg, 0), optimizer)
  one = learner.Learner(cfg, rl.learner, optimizer, state)
  pool = test_learner.Pool((1.0, 0.0))
  routes = []
  for version in (1, 2):
    scalars = one.update([one.credit(pool.group(index)) for index in (0, 1)])
    assert np.isfinite(scalars['loss']) and scalars['grad_norm'] > 0
    controller = gnmr.find(one.state.opt_state)
    assert int(controller.steps) == one.version == version
    routes.append(np.asarray(controller.route).sum())
    assert scalars['gnmr/promoted'] == routes[-1] / cfg.num_layers
  assert routes[0] == 1


def test_a_controller_without_a_second_path_is_an_error():
  settings = forge.get_config()
  settings.rl.optimizer.gnmr.max_active = 1
  config = common.build(ForgeConfig, settings)
  with pytest.raises(ValueError, match='GnmrConfig.max_active=1'):
    optimizer_lib.make(config.rl.optimizer, config.model)
