"""How benchmarks.expand_mtp adds up over seeds; it runs for minutes itself."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from benchmarks import expand_mtp
from tests import quick
from tests.train import test_step


def row(seed, source, after, main, *modules):
  fields = dict(seed=seed, source=source, after=after, steps=9)
  return {**fields, 'main': main, 'modules': list(modules)}


def test_parts_of_a_mixture():
  """Block, projection and norms are those that the mixture names."""
  cfg = dataclasses.replace(
    test_step.CFG, dtype='float32', param_dtype='float32', num_mtp_modules=1
  )
  variables, key = quick.variables(cfg, 0, noise=0.1, bias=0.1), jax.random.key(1)

  @jax.jit  # one program: each operation alone would be compiled, too
  def all_of_them(variables, key):
    return {
      source: expand_mtp.expanded(source, cfg, variables, key)[1]
      for source in ('mtp', 'main', 'random', *expand_mtp.MIXTURES)
    }

  made = all_of_them(variables, key)

  def part(source, *path):
    return functools.reduce(lambda tree, name: tree[name], path, made[source])

  for source, (block, projection, norms) in expand_mtp.MIXTURES.items():
    pairs = [(('router', 'mtp'), block), (('params', 'mtp', 'embed_norm'), norms)]
    pairs += [(('params', 'mtp', 'layers', 'gate'), block)]
    if projection in made:
      pairs.append((('params', 'mtp', 'proj'), projection))
    for path, origin in pairs:
      np.testing.assert_array_equal(part(source, *path), part(origin, *path))
  random = np.split(np.asarray(part('random', 'params', 'mtp', 'proj')), 2, 1)[1]
  passed, tenth = np.split(np.asarray(part('main', 'params', 'mtp', 'proj')), 2, 1)
  np.testing.assert_array_equal(passed[1], np.eye(cfg.embed_dim))
  for name, halves in (
    (expand_mtp.WHOLE, (passed, random)),
    (expand_mtp.BOTH, (passed, passed)),
    (expand_mtp.EMBEDDING, (tenth, passed)),
  ):
    projection = np.asarray(part(name, 'params', 'mtp', 'proj'))
    np.testing.assert_array_equal(projection[1], np.concatenate(halves, axis=1)[1])


def test_tables():
  """Medians over seeds; differences are taken within a seed, before the median."""
  rows = [row(seed, '', 'one module', 2.0 + seed, 3.0) for seed in (0, 1, 2)]
  for seed, better in ((2, 0.3), (0, 0.1), (1, 0.2)):  # in any order
    for after in ('frozen', 'joint'):
      rows.append(row(seed, 'mtp', after, 2.0, 3.0, 4.0 + seed, 5.0))
      random = 4.0 + seed + better
      rows.append(row(seed, 'random', after, 2.0, 3.0, random, 4.0))
  medians, _, ahead = expand_mtp.tables(rows).partition('\n\n')
  lines = medians.splitlines()
  assert lines[2] == '|  | one module | 9 | 3.000 | 3.000 |  |  |'
  assert lines[3] == '| mtp | frozen | 9 | 2.000 | 3.000 | 5.000 | 5.000 |'
  assert lines[4] == '| random | frozen | 9 | 2.000 | 3.000 | 5.200 | 4.000 |'
  lines = ahead.splitlines()
  assert len(lines) == 4 and lines[2].startswith('| mtp, frozen | +0.000 ')
  assert '| +0.200 [+0.100, +0.300] | -1.000 [-1.000, -1.000] |' in lines[2]


def test_by_step():
  """Each seed's curve is compared with that of random weights of the same seed."""
  rows = []
  for seed, ahead in ((0, 0.1), (1, 0.3), (2, 0.2)):
    for source, below in (('random', 0.0), ('main', ahead)):
      curve = [[step, 9.0 - seed - below] for step in (5, 10, 15)]
      rows.append(row(seed, source, 'frozen', 2.0, 3.0, 4.0, 5.0) | {'curve': curve})
  lines = expand_mtp.tables(rows).splitlines()
  assert lines[-3] == '| below random, at step | 5 | 10 | 15 |'
  assert lines[-1] == '| main |' + ' +0.200 [+0.100, +0.300] |' * 3
