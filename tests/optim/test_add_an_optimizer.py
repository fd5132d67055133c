"""The example of docs/add_an_optimizer.md runs, and does what the page says."""

import dataclasses
import pathlib
import re
import runpy

import jax
import numpy as np
import pytest

from m2jax import forest, optim

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'add_an_optimizer.md'


@pytest.fixture(scope='module')
def names(tmp_path_factory):
  """What the page's Python defines."""
  (code,) = re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL)
  path = tmp_path_factory.mktemp('page') / 'page.py'
  path.write_text(code)
  return runpy.run_path(str(path))


def test_each_kind_is_updated_by_its_rule(names):
  """Two steps by hand for the added rule, weight decay included; Muon and Adam update
  what they would without it."""
  config = names['optimizer']
  rng = np.random.default_rng(0)
  shapes = {'q': (2, 3, 4), 'gate': (2, 2, 3, 4), 'embed': (5, 3)}
  params, *gradients = (
    {name: np.float32(rng.normal(size=s)) for name, s in shapes.items()}
    for _ in range(3)
  )

  def updates(config):
    tx = optim.make(config)
    state, step = jax.jit(tx.init)(params), jax.jit(tx.update)
    for gradient in gradients:
      update, state = step(gradient, state, params)
    return update

  config = dataclasses.replace(config, clip_norm=None)
  got = updates(config)
  first, second = (g['q'] for g in gradients)
  direction = np.sign(0.9 * 0.01 * first + 0.1 * second)
  want = -1e-3 * (direction + 0.1 * params['q'])
  np.testing.assert_allclose(got['q'], want, rtol=1e-5)
  other = updates(
    optim.OptimizerConfig(
      by_kind=optim.ByKind(expert='muon'), weight_decay=0.1, clip_norm=None
    )
  )
  for name in ('gate', 'embed'):
    np.testing.assert_allclose(got[name], other[name], rtol=1e-6)


def test_it_fits_the_train_step(names):
  """A step returns a state like the one that it took; by shapes, without compiling."""
  step, state = names['step'], names['state']
  parts = step.programs(names['cfg'], names['tx'], step.nll, step.StepConfig())
  batch = forest.chain([np.arange(8)], row_tokens=8, rows=1)
  sums = jax.eval_shape(parts.micro, state.variables, batch)
  after, _ = jax.eval_shape(parts.apply, state, sums)
  like = jax.eval_shape(lambda state: state, state)
  assert jax.tree.structure(after) == jax.tree.structure(like)
  assert jax.tree.leaves(after) == jax.tree.leaves(like)


def test_its_settings_are_checked(names):
  """The page's config refuses what it says it does."""
  with pytest.raises(ValueError, match='LionConfig.b2='):
    names['LionConfig'](b2=1.0)
  with pytest.raises(ValueError, match='by_kind.norm='):
    names['MyOptimizerConfig'](by_kind=optim.ByKind(norm='lion'))
