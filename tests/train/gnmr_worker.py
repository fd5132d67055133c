"""Steps with GNMR on 4 virtual devices and on one; prints JSON for test_gnmr.py.

python -m tests.train.gnmr_worker

`worst`: the leaf of the last state with the largest relative error, and this; `routes`:
of each step, on the mesh and on one device; `programs`: compilations of the pass;
`in_branches`: collectives in both paths, for each branch between them.
"""

from __future__ import annotations

import json
import re

import jax
import numpy as np

from m2jax import config, platforms, sharding
from m2jax.optim import GnmrConfig, OptimizerConfig, gnmr
from m2jax.optim import optimizer as optimizer_lib
from m2jax.train import feeds
from m2jax.train import step as train_step
from tests import quick
from tests.sharding import mesh_worker, small

ROWS, STEPS = 4, 3
CFG = small.config(
  num_mtp_modules=0,
  remat='layer',
  matmuls=config.Matmuls('activations_int4'),
  recovery=config.Matmuls('activations_int8'),
)
# the thresholds make candidates of both layers, of which the cap takes one
OPTIMIZER = OptimizerConfig(gnmr=GnmrConfig(max_active=1, alpha=0.9, lock_steps=0))
BRANCH = re.compile(r' conditional\(.*branch_computations=\{(.*?)\}.*path\)*/cond"')


def train(where):
  """The state after some steps, the routes that they chose, and the pass."""
  tx = optimizer_lib.make(OPTIMIZER, CFG, where)
  step = train_step.StepConfig(micro_rows=ROWS)
  parts = train_step.programs(CFG, tx, train_step.nll, step, where)
  sums_of = feeds.rows(parts, step, where)
  state = train_step.start_state(quick.variables(CFG, 0), CFG, tx, where)
  routes = []
  for number in range(STEPS):
    given = gnmr.with_route(state.variables, state.opt_state)
    (sums,) = sums_of(given, small.batch(number, ROWS))
    state, _ = parts.apply(state, sums)
    routes.append(np.asarray(gnmr.find(state.opt_state).route).tolist())
  return state, routes, parts.micro


def computation(hlo: str, name: str) -> str:
  """Text of a computation and of those that it calls."""
  body = re.search(rf'^%?{re.escape(name)} .*?^\}}', hlo, re.M | re.S).group()
  called = re.findall(r'(?:calls|to_apply|body|condition)=%?([\w.-]+)', body)
  called += re.findall(
    r'%?([\w.-]+)', ' '.join(re.findall(r'computations=\{(.*?)\}', body))
  )
  return body + ''.join(computation(hlo, other) for other in called)


def main():
  platforms.own_only()
  jax.config.update('jax_enable_x64', True)
  jax.config.update('jax_num_cpu_devices', 4)
  where = sharding.make(sharding.MeshConfig(fsdp=2, expert=2))
  got, routes, micro = train(where)
  want, one_device, _ = train(sharding.ONE_DEVICE)
  errors = mesh_worker.relative_errors(jax.device_get(got), jax.device_get(want))
  worst = max(errors, key=errors.get)

  given = gnmr.with_route(got.variables, got.opt_state)
  batch = where.place(small.batch(0, ROWS), sharding.batch_specs(where.rules))
  hlo = micro.lower(given, batch).compile().as_text()
  branches = [re.findall(r'[\w.-]+', names) for names in BRANCH.findall(hlo)]
  found = [
    [len(mesh_worker.collectives(computation(hlo, name))) for name in names]
    for names in branches
  ]
  result = {
    'worst': [worst, errors[worst]],
    'routes': [routes, one_device],
    'programs': micro._cache_size(),
    'in_branches': found,
  }
  print(json.dumps(result), flush=True)


if __name__ == '__main__':
  main()
