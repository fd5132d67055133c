"""Jobs in block FP8 with GNMR and SSO, as their config lines set them."""

from __future__ import annotations

import numpy as np
import pytest

from configs import forge
from experiments import common
from m2jax.checkpoint import policy
from m2jax.config import Matmuls
from m2jax.forge.config import ForgeConfig
from m2jax.observe import metrics as metrics_lib
from m2jax.optim import gnmr
from m2jax.optim import optimizer as optimizer_lib
from m2jax.rl import learner
from m2jax.train import step as train_step
from tests import quick
from tests.experiments import conftest
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


@pytest.mark.parametrize('phase', ['sft', 'rl'])
def test_a_controller_without_a_second_path_is_an_error(phase):
  """Before anything is trained; a recovery path of its own is one line away."""
  settings = forge.get_config()
  settings[phase].optimizer.gnmr.max_active = 1
  with pytest.raises(common.BadInput, match='GnmrConfig.max_active=1'):
    common.build(ForgeConfig, settings)
  settings.model.recovery.kind = 'activations_int8'
  built = common.build(ForgeConfig, settings)
  assert built.model.paths == (Matmuls(), Matmuls('activations_int8'))


@pytest.mark.long
def test_all_options_in_a_job(tmp_path, texts):
  """Block FP8, GNMR, SSO and the router's bias, by flags: the job runs to its end, logs
  all of them, and its checkpoint is a policy in this precision. (The main job runs so
  in benchmarks/forge_options.py, which takes minutes.)"""
  flags = [f'--workdir={tmp_path}', *conftest.text_flags(texts)]
  flags += ['--config.model.matmuls.kind=block_fp8', '--config.model.num_layers=2']
  optimizer = '--config.pretrain.optimizer'
  flags += [f'{optimizer}.name=sso', f'{optimizer}.gnmr.max_active=1']
  flags += [f'{optimizer}.gnmr.alpha=0.9']  # promotes from the first step on
  conftest.run('pretrain', *flags, variant=':smoke')
  records = metrics_lib.read(tmp_path, 'pretrain')
  assert max(r['gnmr/promoted'] for r in records) == 0.5
  last = records[-1]
  assert np.isfinite(last['loss'])
  assert 0.9 < last['sphere/sigma_min'] <= last['sphere/sigma_max'] < 1.1
  found = policy.load(tmp_path)
  assert found.model.matmuls == Matmuls('block_fp8')
  assert np.any(found.variables['router']['layers'])
