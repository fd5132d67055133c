"""The full-width model's step compiles for TPUs of three generations."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks import plan_compilers
from m2jax import config
from m2jax.plan import search
from tests.plan import tpu_worker

_ROOT = pathlib.Path(__file__).parents[2]

pytestmark = [
  pytest.mark.long,
  pytest.mark.tpu_backend,
  pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='needs libtpu'),
]


def planned(name):
  child = subprocess.run(
    [sys.executable, '-m', 'tests.plan.tpu_worker', name],
    cwd=_ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=2700,
  )
  assert child.returncode == 0, child.stderr[-3000:]
  return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize('name', tpu_worker.SERVED)
def test_the_engine_does_not_copy_its_cache(name):
  """In the programs that serve, on the chip, there is no room for a copy of the keys of
  one layer: not for the kernel that reads them, nor for the writes."""
  (program,) = planned(name)['programs']
  cfg, (rows, context, _) = config.m2(), tpu_worker.SERVED[name]
  keys = 2 * rows * context * cfg.num_kv_heads // 4 * cfg.head_dim
  assert program['memory']['arguments'] > 2 * 2 * keys
  assert program['memory']['temporaries'] < keys


@pytest.mark.parametrize('name', tpu_worker.SLICES)
def test_step_compiles(name):
  """What no test on CPU sees: that kernels, layouts and collectives exist on the chip,
  that the step fits, and that the program sends and holds what its specs say."""
  plan = planned(name)
  assert plan['fits']
  assert 0 < plan['share_of_peak'] < 1
  micro, apply = plan['programs']
  state = plan['parameters_bytes'] + plan['optimizer_bytes']
  assert apply['memory']['arguments'] >= state
  sent = {c['kind']: c for c in micro['collectives'] if c['group'] == 8}
  # Forward rows and results; backward rows and cotangents there, cotangents back, and
  # one weight of each row both ways, which take little.
  assert sent['ragged-all-to-all']['count'] == 7
  cfg, tokens = config.m2(), tpu_worker.CONTEXT
  once = 2 * tokens * cfg.experts_per_token * cfg.embed_dim
  assert sent['ragged-all-to-all']['bytes'] == pytest.approx(5 * once, rel=0.03)
  kinds = {c['kind'] for c in micro['collectives']}
  assert {'all-gather', 'ragged-all-to-all'} <= kinds


def test_collectives_of_this_compiler():
  """Bytes by hand, for the compiler that is installed: run with each supported pair of
  jax and libtpu, this says that both give the plan the same collectives."""
  name = 'fsdp tensor'
  child = subprocess.run(
    [sys.executable, '-m', 'benchmarks.plan_compilers', '--worker', name],
    cwd=_ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=1200,
  )
  assert child.returncode == 0, child.stderr[-3000:]
  found = json.loads(child.stdout.splitlines()[-1])['found']
  sizes = {(kind, group): size for kind, group, size in found}
  cfg, tensor, fsdp = config.m2(), 4, 16
  D = cfg.embed_dim
  experts = cfg.num_experts * 3 * D * cfg.expert_dim // tensor
  heads = 2 * D * (cfg.num_heads + cfg.num_kv_heads) * cfg.head_dim // tensor
  router, head = D * cfg.num_experts, D * cfg.vocab_size // tensor
  # a layer's weights twice, in bf16; router and head in fp32, the head once
  gathered = 2 * (2 * (experts + heads) + 4 * router) + 4 * head
  assert sizes['all-gather', fsdp] == pytest.approx(gathered, rel=0.005)
  scattered = 4 * (experts + heads + router + head)  # gradients, in fp32
  assert sizes['reduce-scatter', fsdp] == pytest.approx(scattered, rel=0.005)
  # a block's tokens, and those at both ends of the trunk
  n = search.counts('layer', True, True)
  tokens = 2 * D * plan_compilers.CONTEXT * plan_compilers.DEVICES // fsdp
  gathers, scatters = (n.gathers + 2) * tokens, (n.scatters + 2) * tokens
  assert sizes['all-gather', tensor] == pytest.approx(gathers, rel=0.005)
  assert sizes['reduce-scatter', tensor] == pytest.approx(scatters, rel=0.005)
  assert sizes['all-reduce', tensor] < 0.01 * tokens * n.gathers
