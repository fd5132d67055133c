"""The comparison with transformers: figures, messages and the worker of m2jax."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest

from benchmarks import train_vs_transformers as benchmark
from tests import processes

SMALL = ['--layers=1', '--rows=2', '--row_tokens=16']


@pytest.fixture(autouse=True)
def parsed():
  """Flags of a small comparison, as the command line would give them."""
  values = {name: benchmark.FLAGS[name].value for name in benchmark.FLAGS}
  benchmark.FLAGS(['test', *SMALL])
  yield
  for name, value in values.items():
    benchmark.FLAGS[name].value = value


def test_report():
  """Medians exclude the two warm-up steps; parts and rest add up to the step; the floor
  counts the operations that the result needs."""
  answers = {
    'm2jax': [dict(seconds=s, cpu_s=2 * s, loss=1.0) for s in (9, 9, 1, 2, 4)],
    'transformers': [dict(seconds=s, cpu_s=s, loss=1.0) for s in (9, 9, 3, 3, 3)],
  }
  cfg = benchmark.model_config()
  parts = dict(attention=0.5, experts=0.5, head=0.1, optimizer=0.2)
  found = benchmark.report(cfg, answers, parts | dict(matmul_flops_s=1e9))
  assert found['sides']['m2jax']['step_s'] == 2
  assert found['sides']['m2jax']['cpu_s'] == 4
  assert found['sides']['m2jax']['tokens_s'] == 2 * 16 / 2
  assert found['speed_up'] == 1.5
  assert found['speed_ups'] == [3, 1.5, 0.75]
  assert sum(found['parts_s'].values()) == pytest.approx(2)
  # per token: attention and expert matrices, router, head; 136 visible pairs a row
  layer = 256 * (2 * 256 + 2 * 64) + 256 * 32 + 4 * 3 * 256 * 128
  want = 2 * 3 * 32 * (layer + 256 * 512) + 2 * 7 * 2 * 136 * 256
  assert found['step_gflop'] == pytest.approx(want / 1e9)
  assert found['matmul_fraction'] == pytest.approx(want / 1e9 / 2)


def test_parameters():
  """The model has the 13.5M parameters that docs/speed.md states."""
  benchmark.FLAGS.layers = 4
  cfg = benchmark.model_config()
  layer = 256 * (2 * 256 + 2 * 64) + 256 * 32 + 32 * 3 * 256 * 128
  assert 13.4e6 < 4 * layer + 2 * 256 * 512 < 13.6e6
  assert cfg.num_mtp_modules == 0 and cfg.num_layers == 4


def test_m2jax_worker():
  """The worker of m2jax trains (the loss falls) and times the parts of a step."""
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  process = processes.popen(*benchmark.m2jax_command()[2:], **pipes)
  asked = [dict(do='step')] * 3 + [dict(do='parts')]
  lines, _ = process.communicate('\n'.join(map(json.dumps, asked)), timeout=300)
  *steps, parts = map(json.loads, lines.splitlines())
  losses = [s['loss'] for s in steps]
  assert losses == sorted(losses, reverse=True)
  assert all(s['seconds'] > 0 and s['cpu_s'] > 0 for s in steps)
  assert set(parts) == {*benchmark.PARTS, 'matmul_flops_s'} - {'rest'}
  assert all(value > 0 for value in parts.values())


def test_missing_torch(tmp_path):
  """If torch or its Python is missing, the message gives the command to install it."""
  empty = tmp_path / 'python'
  empty.write_text('#!/bin/sh\necho "No module named torch" >&2\nexit 1\n')
  empty.chmod(0o755)
  for python, problem in ((empty, 'No module named torch'), ('/no/python', 'No such')):
    benchmark.FLAGS.torch_python = str(python)
    with pytest.raises(SystemExit, match='pip install torch') as e:
      benchmark.check_torch()
    assert problem in str(e.value)


def test_fastest_is_chosen():
  """The fastest combination is chosen, failures are reported, and combinations that
  need too much memory are skipped."""
  cost = {'grouped_mm': 2.0, 'eager': 3.0}

  def ask(do, experts=None, optimizer=None):
    if do == 'make':
      side.now = cost[experts] - (optimizer == 'foreach')
      return {'error': 'RuntimeError: no'} if optimizer == 'fused' else {}
    return {'seconds': side.now}

  side = types.SimpleNamespace(ask=ask)
  benchmark.FLAGS.experts_gb = 0.0
  chosen, tried = benchmark.fastest_torch(side, benchmark.model_config())
  assert chosen == dict(experts='grouped_mm', optimizer='foreach')
  assert tried['eager, loop'] == 3.0
  assert tried['grouped_mm, fused'] == 'RuntimeError: no'
  assert tried['batched_mm, fused'].startswith('skipped')


@pytest.mark.long
@pytest.mark.torch
def test_against_transformers():
  """If torch is installed, both sides run and their losses agree step by step."""
  pytest.importorskip('transformers')
  command = [sys.executable, '-m', 'benchmarks.train_vs_transformers', *SMALL]
  done = subprocess.run(
    [*command, '--json', '--steps=2', '--device=cpu'],
    cwd=processes.ROOT,
    stdout=subprocess.PIPE,
    timeout=600,
    check=True,
  )
  found = json.loads(done.stdout)
  ours, theirs = (side['losses'] for side in found['sides'].values())
  assert ours == pytest.approx(theirs, rel=1e-3)
  assert found['speed_up'] > 0
