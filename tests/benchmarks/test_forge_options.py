"""How benchmarks.forge_options adds up; it runs the main job for minutes itself."""

from __future__ import annotations

import pytest

from benchmarks import forge_options
from configs import forge
from experiments import common
from m2jax.config import Matmuls
from m2jax.forge.config import ForgeConfig


@pytest.mark.parametrize('name', forge_options.OPTIONS)
def test_flags_are_of_the_config(name):
  """Both phases have the options, and the job accepts them together."""
  settings = forge.get_config('smoke').lock()
  for flag in forge_options.flags(name):
    path, _, value = flag.removeprefix('--config.').partition('=')
    settings.update_from_flattened_dict({path: int(value) if value == '1' else value})
  built = common.build(ForgeConfig, settings)
  every = name == 'all four'
  low = built.model.matmuls == Matmuls('block_fp8')
  assert low == (every or 'FP8' in name)
  for part in (built.sft, built.rl):
    assert (part.optimizer.name == 'sso') == (every or name == 'SSO')
    assert bool(part.optimizer.gnmr.max_active) == (every or 'GNMR' in name)
  for step in (built.sft.step, built.rl.learner.step):
    assert step.bias_update_rate > 0


def record(step, loss, **more):
  return dict(step=step, loss=loss, used_s=10.0 + step, max_violation=0.5, **more)


def test_table():
  """Missing metrics leave cells empty; a step's time is without the first one's."""
  sphere = {'sphere/sigma_min': 0.99, 'sphere/sigma_max': 1.01}
  sft = [record(1, 5.0), record(2, 4.0), record(3, 3.0)]
  plain = forge_options.figures(sft, [record(1, 0.1)])
  with_sso = forge_options.figures(
    [r | sphere | {'used_s': 2 * r['used_s']} for r in sft],
    [record(4, 0.1, **{'sphere/evaluations': 3.0, 'mismatch/mean': 2e-5})],
  )
  rows = [{'name': 'plain', 'seed': 0, **plain}, {'name': 'SSO', 'seed': 0, **with_sso}]
  lines = forge_options.table(rows).splitlines()
  assert '| plain | 5.000 → 3.000 | 1 |  | 0.50 | 1.00 |' in lines
  assert '| SSO | 5.000 → 3.000 | 4 | 2.0e-05 | 0.50 | 2.00 |' in lines
  assert lines[-2:] == [
    '| plain |  |  |  |  |',
    '| SSO | 0.9900 … 1.0100 | 3.0 |  |  |',
  ]
