"""More MTP modules out of one: what is copied, what stays, when training moves on."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import forest
from m2jax.checkpoint import policy
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.observe import metrics as metrics_lib
from m2jax.train import expand_mtp
from m2jax.train import step as train_step
from m2jax.train.expand_mtp import ExpandConfig
from m2jax.train.loop import LoopConfig, Run
from m2jax.train.stages import PhasesConfig
from tests import quick, row_model
from tests.train import test_pretrain

CFG = dataclasses.replace(test_pretrain.CFG, num_mtp_modules=1)
KEY = jax.random.key(5)


def variables(cfg=CFG):
  """Weights of a model, router biases that differ."""
  return quick.variables(cfg, 0, bias=1.0)


def leaves(tree, *path):
  for key in path:
    tree = tree[key]
  return jax.tree.leaves(tree)


@pytest.mark.parametrize('source', expand_mtp.SOURCES)
def test_what_there_was_stays(source):
  """The main model and module 1 keep every leaf bit for bit, and the larger model is of
  the shapes that it would be initialised with."""
  before = variables()
  bigger, after = expand_mtp.expand(CFG, before, 3, source, KEY)
  assert dataclasses.replace(bigger, num_mtp_modules=1) == CFG
  want = jax.eval_shape(lambda: train_step.init_variables(bigger, KEY))
  for (path, new), shape in zip(
    jax.tree.leaves_with_path(after), jax.tree.leaves(want), strict=True
  ):
    assert (new.shape, new.dtype) == (shape.shape, shape.dtype), path
    old = before
    for key in path:
      old = old[key.key]
    np.testing.assert_array_equal(new[: len(old)], old)


def test_copy_of_module_1():
  """Modules 2 and 3 are module 1, its router bias included."""
  _, after = expand_mtp.expand(CFG, variables(), 3, 'mtp', KEY)
  for part in ('params', 'router'):
    for leaf in leaves(after, part, 'mtp'):
      assert len(leaf) == 3
      np.testing.assert_array_equal(leaf[1], leaf[0])
      np.testing.assert_array_equal(leaf[2], leaf[0])


def test_copy_of_the_main_model():
  """Modules 2 and 3 have the last main block and its bias; they begin with the hidden
  state as it is, and a little of the embedding."""
  cfg = dataclasses.replace(CFG, num_layers=2)
  before = variables(cfg)
  _, after = expand_mtp.expand(cfg, before, 3, 'main', KEY)
  for new in (1, 2):
    for ours, main in zip(
      leaves(after, 'params', 'mtp', 'layers'),
      leaves(before, 'params', 'layers'),
      strict=True,
    ):
      np.testing.assert_array_equal(ours[new], main[-1])
    bias = after['router']['mtp'][new]
    np.testing.assert_array_equal(bias, before['router']['layers'][-1])
    module = after['params']['mtp']
    hidden, embedding = np.split(np.asarray(module['proj'][new]), 2)
    np.testing.assert_array_equal(hidden, np.eye(cfg.embed_dim))
    assert 0.01 < np.std(embedding) * (2 * cfg.embed_dim) ** 0.5 < 0.5
    assert np.all(module['hidden_norm'][new] == 1)
    assert np.all(module['embed_norm'][new] == 1)


@pytest.mark.parametrize('source', ['main', 'random'])
def test_a_model_without_modules(source):
  """The released weights have none: the first can be made too, but not copied."""
  cfg = dataclasses.replace(CFG, num_mtp_modules=0)
  before = variables(cfg)
  bigger, after = expand_mtp.expand(cfg, before, 3, source, KEY)
  want = jax.eval_shape(lambda: train_step.init_variables(bigger, KEY))
  assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, want)
  with pytest.raises(ValueError, match="source='main'"):
    expand_mtp.expand(cfg, before, 3, 'mtp', KEY)
  with pytest.raises(ValueError, match='has 1 MTP modules already'):
    expand_mtp.expand(CFG, variables(), 1, source, KEY)


def test_module_losses():
  """Of each module over the tokens it scores, by the model written apart."""
  bigger, after = expand_mtp.expand(CFG, variables(), 3, 'random', KEY)
  documents = [np.arange(start, start + 7) for start in (1, 9)]
  batches = [forest.chain([d], row_tokens=8, rows=1) for d in documents]
  losses = expand_mtp.module_losses(bigger, after, batches)
  score = jax.jit(lambda tokens: row_model.score(after, tokens, bigger)[1])
  want = -np.mean([[np.mean(module) for module in score(d)] for d in documents], 0)
  np.testing.assert_allclose(losses, want, rtol=1e-4)


def settings(**more) -> ExpandConfig:
  part = test_pretrain.config(
    stages=((8, 4, 0),),
    phases=PhasesConfig(),
    loop=LoopConfig(steps=12, checkpoint_every=2, log_every=1),
  )
  joint = dataclasses.replace(part, loop=LoopConfig(steps=4, log_every=1))
  few = {'modules': 2, 'check_every': 3, **more}
  return ExpandConfig(frozen=part, joint=joint, **few)


def fit(workdir, config, source, joint_source):
  with metrics_lib.MetricsWriter(workdir, use_tensorboard=False) as metrics:
    return expand_mtp.fit(
      config,
      CFG,
      variables(),
      expand_mtp.Data([source], [joint_source], test_pretrain.documents(7)),
      workdir,
      functools.partial(Run, metrics=metrics, files={policy.TOKENIZER_FILE: b'{}'}),
      seed=1,
    )


def rounds(workdir):
  return [r['step'] for r in metrics_lib.read(workdir, 'frozen_held_out')]


@pytest.mark.long
def test_both_parts_and_resume(tmp_path):
  """Frozen until the loss is stable, then joint: killed in either part, the run takes
  the same decisions and ends with the same weights, which are a policy."""
  config = settings(tolerance=-10.0)  # never stable: the budget of twelve steps ends it
  documents, killed = test_pretrain.documents, tmp_path / 'killed'
  model, whole = fit(tmp_path / 'whole', config, documents(), documents(1))
  assert model.num_mtp_modules == 2 and rounds(tmp_path / 'whole') == [3, 6, 9, 12]
  source, joint = (test_pretrain.Dying(documents(i)) for i in range(2))
  source.left = 11
  with pytest.raises(test_pretrain.Killed):
    fit(killed, config, source, joint)
  assert rounds(killed) == [3] and not (killed / 'pretrain').exists()
  source.left, joint.left = 10**9, 6
  with pytest.raises(test_pretrain.Killed):
    fit(killed, config, source, joint)
  joint.left = 10**9
  _, resumed = fit(killed, config, source, joint)
  for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
    np.testing.assert_array_equal(a, b)
  assert rounds(killed) == rounds(tmp_path / 'whole')
  with CheckpointManager(tmp_path / 'whole' / 'frozen', read_only=True) as manager:
    frozen = manager.restore().state['variables']
  expanded = expand_mtp.expand(CFG, variables(), 2, 'mtp', KEY)[1]
  for name in ('layers', 'embed', 'head', 'final_norm'):
    for a, b in zip(
      leaves(frozen, 'params', name), leaves(expanded, 'params', name), strict=True
    ):
      np.testing.assert_array_equal(a, b)
  head = whole.variables['params']['head']
  assert not np.array_equal(head, frozen['params']['head'])  # the joint part moved it
  assert policy.load(tmp_path / 'whole').model == model


def test_stable_ends_the_frozen_part(tmp_path, monkeypatch):
  """Rounds train the modules alone until the held-out loss falls by less than the
  tolerance; the joint part continues with their weights, on its own data. A restart
  decides by the losses that were recorded."""
  calls, losses = [], [8.0, 4.0, 3.9]

  def part(config, model, sources, run, *, variables, only_mtp=False, **_):
    steps = config.loop.steps
    calls.append((run.phase, steps, only_mtp, variables.get('trained', 0), sources))
    return train_step.TrainState(np.int32(steps), {'trained': steps}, ())

  def held_out(config, model, variables, documents, sharding):
    assert model.num_mtp_modules == 2 and documents == ['held out']
    return {'mtp_loss': losses[variables['trained'] // 3 - 1]}

  monkeypatch.setattr(expand_mtp.pretrain, 'fit', part)
  monkeypatch.setattr(expand_mtp.pretrain, 'held_out', held_out)
  monkeypatch.setattr(test_pretrain, 'documents', lambda seed: ['held out'])
  _, state = fit(tmp_path, settings(tolerance=0.1), 'frozen', 'joint')
  assert calls == [
    ('frozen', 3, True, 0, ['frozen']),
    ('frozen', 6, True, 3, ['frozen']),
    ('frozen', 9, True, 6, ['frozen']),
    ('pretrain', 4, False, 9, ['joint']),
  ]
  assert rounds(tmp_path) == [3, 6, 9] and int(state.step) == 4
  del calls[:]
  fit(tmp_path, settings(tolerance=0.1), 'frozen', 'joint')
  assert [call[:2] for call in calls] == [('frozen', 9), ('pretrain', 4)]
  assert rounds(tmp_path) == [3, 6, 9]


def test_bad_settings_are_named():
  """A broken config says which field and what it should be."""
  for fields in ({'source': 'none'}, {'modules': 0}, {'check_every': 0}):
    with pytest.raises(ValueError, match=f'ExpandConfig.{next(iter(fields))}='):
      settings(**fields)
