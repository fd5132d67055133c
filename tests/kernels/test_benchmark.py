"""benchmarks/kernels.py: what it counts, and that every case runs and is right."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import kernel_cases, kernels
from benchmarks.kernel_cases import attention


def test_pairs_are_counted_one_by_one():
  """The bound of attention rests on the number of visible pairs."""
  for kind in ('chain', 'documents', 'star'):
    end = np.stack([attention.tree(kind, 37), attention.tree(kind, 37)])
    seen = sum(j <= i < row[j] for row in end for i in range(37) for j in range(37))
    assert attention.visible_pairs(end) == seen
  star = attention.tree('star', 32)
  assert list(star[:2]) == [32, 32]
  assert list(star[2:]) == [j for j in range(4, 33, 2) for _ in range(2)]


def test_costs():
  """Operations and bytes of a case written out by hand."""
  op = kernel_cases.OPS['grouped_matmul']
  arrays = op.make(rows=20, inner=3, outer=5, groups=2, dtype=np.float32)
  live = int(arrays[2].sum())
  assert 10 <= live <= 18  # a tenth of the rows at least is filling
  assert op.cost(arrays, False) == (2 * live * 15, 4 * (20 * 3 + 2 * 15 + 20 * 5))
  op = kernel_cases.OPS['tree_attention']
  shape = dict(rows=1, length=8, heads=4, kv_heads=2, dim=16, dtype=np.float32)
  flops, size = op.cost(op.make(**shape, kind='chain'), False)
  assert flops == 2 * 2 * 36 * 4 * 16
  assert size == 4 * 16 * 8 * (4 + 2 + 2 + 4)
  op = kernel_cases.OPS['paged_attention']
  shape = dict(rows=3, chunk=2, context=16, heads=4, kv_heads=2, dim=8, page=4)
  arrays = op.make(**shape, dtype=np.float32)
  position = np.asarray(arrays[4])
  flops, size = op.cost(arrays, False)
  assert flops == 2 * 2 * sum(int(p) + 1 for p in position.flat) * 4 * 8
  stored = sum(int(row[-1]) + 1 for row in position)
  assert size == 4 * 8 * (2 * 3 * 2 * 4 + 2 * stored * 2)


def test_bound():
  """The longer of the two times, and which it is."""
  row = dict(ms=4.0, flops=2e9, bytes=1e9)
  assert kernels.bounded(row, 1e12, 1e12) == row | dict(
    bound_ms=2.0, limit='compute', fraction=0.5
  )
  assert kernels.bounded(row, 1e12, 2.5e11)['limit'] == 'memory'


@pytest.mark.parametrize('op', kernel_cases.OPS.values(), ids=kernel_cases.OPS)
@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
def test_peers_of_other_platforms_exist(op, platform):
  """None needs the platform before it is called."""
  for shape in op.cases['accelerator'].values():
    assert all(map(callable, op.peers(platform, **shape).values()))


@pytest.mark.long
def test_every_case_is_right(capsys):
  """All ops on this machine, value and gradients against float64."""
  found = kernels.main(['--runs=1', '--json'])
  assert len(json.loads(capsys.readouterr().out)['rows']) == len(found)
  ours = [r for r in found if r['implementation'] == 'm2jax']
  passes = {op.name: 2 if op.wrt else 1 for op in kernel_cases.OPS.values()}
  cases = {op.name: len(op.cases['cpu']) for op in kernel_cases.OPS.values()}
  assert len(ours) == sum(passes[name] * n for name, n in cases.items())
  assert all(r['error'] < 1e-5 for r in found if 'ms' in r)
