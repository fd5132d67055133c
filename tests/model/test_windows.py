"""Hybrid sliding windows with sinks: value and gradient in row form, laws 3 and 6."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from m2jax import config as config_lib
from m2jax import forest, params
from m2jax.rollout.engine import forward, pages
from tests.model import test_forest_equivalence as exact

ROOT = pathlib.Path(__file__).parents[2]
# Paths have 6 or 11 tokens: the window cuts most of them, the sinks bring some back.
HYBRID = dict(
  num_layers=2, window=3, full_attention_every=2, sinks=2, num_mtp_modules=0
)


@pytest.mark.parametrize(
  ('seed', 'row_tokens', 'changes'),
  [
    (1, 40, dict(HYBRID, router_scores='softmax')),
    pytest.param(0, 40, dict(HYBRID, num_layers=4), marks=pytest.mark.long),
    pytest.param(
      2,
      256,
      dict(num_layers=3, window=4, full_attention_every=3, num_mtp_modules=2),
      marks=pytest.mark.long,
    ),
    pytest.param(
      3,
      256,
      dict(HYBRID, num_mtp_modules=1, remat='layer', unroll_layers=True),
      marks=pytest.mark.long,
    ),
  ],
)
def test_float64(seed, row_tokens, changes):
  """On random trees, scanned over periods or unrolled, whole trees or split: windows
  count positions of the path, not of the row; also with softmax routing."""
  with jax.enable_x64():
    cfg = exact.config('float64', **changes)
    rng = np.random.default_rng(seed)
    samples = exact.random_samples(rng, count=7, vocab=cfg.vocab_size)
    variables = exact.variables_for(cfg, seed)
    batch = forest.merge(samples, row_tokens=row_tokens)
    want = exact.by_rows(variables, samples, cfg)
    exact.check(cfg, variables, [batch], want, 1e-10)


def test_the_window_is_what_acts():
  """A token sees just what windows and sinks let through: with one windowed layer under
  a full one that copies nothing, only visible tokens change its log-probability."""
  cfg = exact.config('float32', **{**HYBRID, 'sinks': 1})
  variables = exact.variables_for(cfg, 0)
  variables = jax.tree.map(np.array, variables)
  variables['params']['layers']['o'][1] = 0  # the full layer adds nothing
  tokens = np.tile(np.arange(1, 12), (11, 1))
  np.fill_diagonal(tokens[:10], 20)  # the last row is as it was
  batch = forest.chain(list(tokens), row_tokens=11)
  last = np.asarray(exact.token_logprobs(variables, batch, cfg))[:, 10]
  # token 10 is predicted from position 9, which sees 0, 7, 8, 9
  np.testing.assert_array_equal(np.flatnonzero(last[:10] != last[10]), [0, 7, 8, 9])


@pytest.mark.long
def test_a_window_longer_than_the_path_is_none():
  """Then hybrid and full attention are the same function of the same weights."""
  cfg = exact.config('float32', num_mtp_modules=0)
  wide = dataclasses.replace(cfg, window=64, full_attention_every=2)
  variables = exact.variables_for(cfg, 3)
  samples = exact.random_samples(np.random.default_rng(3), count=4, vocab=23)
  batch = forest.merge(samples, row_tokens=64)
  losses = [exact.forest_loss(*variables.values(), batch, c)[0] for c in (cfg, wide)]
  np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_branches_do_not_touch():
  """Changing one branch leaves the others bit-identical, windows and sinks included."""
  cfg = exact.config('float32', **HYBRID)
  variables = exact.variables_for(cfg, 1)
  stem = np.arange(1, 9)
  branches = [np.concatenate([stem, [k, 3, k, 5, 2]]) for k in (10, 12, 14)]

  def score(branches):
    batch = forest.merge([forest.Sample(b, 4) for b in branches], row_tokens=64)
    scores = exact.token_logprobs(variables, batch, cfg)
    tokens = np.take_along_axis(np.asarray(scores), batch.term_token, axis=1)
    return tokens, batch.term_sample

  before, sample = score(branches)
  after, _ = score([branches[0], np.concatenate([stem, [12, 7, 7, 7, 7]]), branches[2]])
  np.testing.assert_array_equal(before[sample != 1], after[sample != 1])
  assert not np.array_equal(before[sample == 1], after[sample == 1])


_WORKER = """
import json, sys
from tests.sharding import mesh_worker
for name, mesh, changes in json.loads(sys.argv[1]):
  mesh_worker.CASES[name] = mesh_worker.Case(mesh, model=changes, experts='tiled')
mesh_worker.main([case[0] for case in json.loads(sys.argv[1])])
"""


@pytest.mark.long
def test_on_meshes():
  """Rows whose tokens are split, alone and with heads and weights: loss, gradients and
  loads are those of one device, scanned and unrolled."""
  hybrid = dict(num_layers=4, window=5, full_attention_every=2, sinks=2)
  cases = [
    ('context', dict(context=4), hybrid),
    ('three', dict(fsdp=2, context=2, tensor=2), {**hybrid, 'unroll_layers': True}),
    ('softmax', dict(expert=2, context=2), {**hybrid, 'router_scores': 'softmax'}),
  ]
  child = subprocess.run(
    [sys.executable, '-c', _WORKER, json.dumps(cases)],
    cwd=ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=1800,
  )
  lines = [json.loads(line) for line in child.stdout.splitlines()]
  assert [line['case'] for line in lines] == [c[0] for c in cases], child.stderr[-3000:]
  for line in lines:
    leaf, error = line['worst']
    assert error < 1e-10 and line['leaves'] > 30, (line['case'], leaf, error)
    assert not any(line['loads'].values())


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    (dict(window=0, full_attention_every=2), 'window=0'),
    (dict(window=4), 'full_attention_every=1: must be above 1'),
    (dict(window=4, full_attention_every=3), 'divisor of num_layers=2'),
    (dict(window=4, full_attention_every=2, sinks=-1), 'sinks=-1'),
    (dict(sinks=1), 'sinks=1: must be 0 without a window'),
    (dict(full_attention_every=2), '1 without a window'),
    (dict(router_scores='relu'), "router_scores='relu': must be one of"),
  ],
)
def test_bad_settings_are_named(changes, match):
  """A setting that would do nothing, or not what it says, is refused."""
  with pytest.raises(ValueError, match=match):
    exact.config('float32', **changes)


def test_not_served():
  """The engine's cached attention has no windows: it is refused, not served wrongly."""
  cfg = exact.config('float32', **HYBRID)
  cache = pages.empty(cfg, 2, 4)
  one = np.ones(1, np.int32)
  rows = forward.Rows(one[:, None], 0 * one, one, one[:, None])
  with pytest.raises(ValueError, match='window=3: .* not served'):
    jax.eval_shape(lambda v: forward.extend(cfg, v, cache, rows), params.shapes(cfg))


def test_presets_have_none():
  """The released model sees everything, and routes by sigmoid."""
  for cfg in (config_lib.m2(), config_lib.ablation(), config_lib.tiny()):
    assert cfg.windows == (None,) and cfg.router_scores == 'sigmoid'
