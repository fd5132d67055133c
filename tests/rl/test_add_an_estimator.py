"""The example of docs/add_an_estimator.md runs, and does what the page says."""

import importlib
import pathlib
import re
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import common
from m2jax.forge.config import ForgeConfig
from m2jax.rl import estimators
from m2jax.rl.terms import OfSequence, Terms
from tests.agents import test_extending
from tests.rl import test_cispo, test_inputs

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'add_an_estimator.md'


@pytest.fixture(scope='module')
def mylab(tmp_path_factory):
  """The package `mylab` of the page, importable, whatever other pages have one."""
  folder = tmp_path_factory.mktemp('lab') / 'mylab'
  folder.mkdir()
  for code in re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL):
    (folder / re.match(r'# mylab/(\w+\.py)', code)[1]).write_text(code)
  others = {n: sys.modules.pop(n) for n in list(sys.modules) if n.startswith('mylab')}
  sys.path.insert(0, str(folder.parent))
  yield folder
  sys.path.remove(str(folder.parent))
  for name in [n for n in sys.modules if n.startswith('mylab')]:
    del sys.modules[name]
  sys.modules.update(others)


def settings(mylab, **flags):
  config = runpy.run_path(str(mylab / 'trusted_config.py'))['get_config']('smoke')
  group = 'rl.learner.estimator'
  config.lock().update_from_flattened_dict(
    {f'{group}.{name}': value for name, value in flags.items()}
  )
  return common.build(ForgeConfig, config).rl.learner


def test_a_config_selects_it_and_its_parameters_are_flags(mylab, tmp_path, monkeypatch):
  """By import path, as an entry point, and by a flag alone, with its own defaults."""
  found = settings(mylab, limit=0.05)
  assert found.estimator == importlib.import_module('mylab.trusted').Config(limit=0.05)
  assert found.reward_of_estimator.normalise == 'group'
  with pytest.raises(common.BadInput, match='limit=-1.*: must be positive'):
    settings(mylab, limit=-1.0)
  by_flag = settings(mylab, kind='grpo')
  assert by_flag.estimator == estimators.make('grpo')
  kinds = {'rl.estimators': 'trusts = mylab.trusted'}
  test_extending.install(tmp_path, 'mylab', **kinds)
  monkeypatch.syspath_prepend(tmp_path)
  assert settings(mylab, kind='trusts', limit=0.2).estimator.limit == 0.2


def test_it_trains_what_it_trusts(mylab):
  """Terms of trajectories within the limit have the policy gradient, others none, and
  the share of these is a metric; padding may have anything."""
  one = estimators.make('mylab.trusted', limit=0.1)
  logprob, old, advantage, weight = test_cispo.batch()
  length = jnp.full(len(weight), 4.0).at[0].set(jnp.nan)
  weight, logprob = weight.at[0].set(0), logprob.at[0].set(jnp.nan)
  mean = jnp.linspace(-0.3, 0.3, len(weight))
  terms = Terms(
    *(logprob, old, advantage, weight), trajectory=OfSequence(4 * mean, length)
  )
  grad = jax.grad(lambda x: one.loss(terms._replace(logprob=x)).sum())(logprob)
  trusted = np.abs(mean) <= 0.1
  np.testing.assert_allclose(grad, -weight * advantage * trusted, rtol=1e-6)
  share = float(np.sum(weight * ~trusted))
  assert one.metrics(terms)['clip_fraction'] == pytest.approx(share, rel=1e-5) != 0


def test_a_need_that_is_not_there_is_refused(mylab):
  """With those that are."""
  of = importlib.import_module('mylab.trusted').Config
  with pytest.raises(ValueError, match="needs .'values'.; there are .*'trajectory'"):
    type('Config', (of,), {'needs': ('values',)})()


@pytest.mark.long
def test_the_learner_trains_it(mylab):
  """An update, in rows and in chunks, gives the same loss and share of trust."""
  found = {}
  with jax.enable_x64():
    for layout in test_inputs.LAYOUTS:
      estimator = estimators.make('mylab.trusted', limit=0.1)
      one = test_inputs.learner_of(layout, estimator)
      credits_ = [one.credit(test_inputs.group(i)) for i in range(test_inputs.GROUPS)]
      found[layout] = one.update(credits_)
  a, b = found.values()
  assert 0 < a['clip_fraction'] < 1 and a['chunked_trees'] != b['chunked_trees']
  for name in ('loss', 'grad_norm'):
    assert a[name] == pytest.approx(b[name], rel=1e-9)
  share = pytest.approx(b['clip_fraction'], rel=1e-6)  # of weights, in float32
  assert a['clip_fraction'] == share
