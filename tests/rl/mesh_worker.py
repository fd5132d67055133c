"""Updates of the learner over 8 virtual CPU devices; prints JSON, one line a case.

python -m tests.rl.mesh_worker NAME…    (of CASES)

A line has the largest relative error of any leaf of the state and any metric against
one device, after two updates of groups in rows and in chunks.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from m2jax import forest, platforms, sharding
from m2jax.optim import optimizer as optimizer_lib
from m2jax.rl import critic, estimators, learner, rewards
from m2jax.rl.estimators import cispo
from m2jax.train import step as train_step
from tests import quick
from tests.rl import test_learner
from tests.sharding import small
from tests.sharding.mesh_worker import relative_errors


@dataclasses.dataclass(frozen=True)
class Case:
  """A mesh, whether recorded expert ids are replayed, the estimator, and the critic."""

  mesh: dict[str, Any]
  replay: bool = True
  estimator: estimators.EstimatorConfig = cispo.Config()
  critic: str = ''


CASES = {
  'fsdp expert tensor': Case(dict(fsdp=2, expert=2, tensor=2)),
  'data fsdp context': Case(dict(data=2, fsdp=2, context=2)),
  'tensor context': Case(dict(tensor=2, context=4)),
  'expert context': Case(dict(expert=4, context=2), replay=False),
  'imitation': Case(
    dict(data=2, expert=2, tensor=2),
    replay=False,
    estimator=estimators.make('expert_iteration'),
  ),
  'sequences': Case(
    dict(data=2, fsdp=2, tensor=2),
    estimator=estimators.make(
      'gspo', clip_low=0.5, clip_high=0.5, reference_kl=0.1, entropy_bonus=0.1
    ),
  ),
  'critic': Case(dict(fsdp=2, tensor=2, context=2), critic='shared'),
  'own critic': Case(dict(data=2, fsdp=2, expert=2), critic='separate'),
}
ROW_TOKENS = 16


class Pool(test_learner.TreePool):
  """Expert ids of this model."""

  def experts(self, tokens):
    seeds = [zlib.crc32(bytes(tokens[: i + 1])) for i in range(len(tokens))]
    ids = [np.random.default_rng(s).permutation(8)[:3] for s in seeds[:-1]]
    ids = np.array([*ids, (-1, -1, -1)], np.int16)
    return np.stack([ids, np.where(ids < 0, -1, (ids + 1) % 8)], axis=1)


def updates(case: Case, where: sharding.Sharding):
  """State and metrics after two updates."""
  cfg = small.config()
  optimizer = optimizer_lib.make(small.optimizer('adam'))
  config = learner.LearnerConfig(
    row_tokens=ROW_TOKENS,
    row_terms=ROW_TOKENS,
    buckets=forest.Buckets((8,), (32,), terms_per_token=2),
    reward=rewards.RewardConfig(alpha=0.0, beta=0.0),
    step=train_step.StepConfig(
      micro_rows=8,
      detach_mtp=True,
      draft_weight=0.5,
      draft_top_k=7,
      bias_update_rate=1e-2,
    ),
    estimator=case.estimator,
    critic=critic.CriticConfig(case.critic, lam=0.8),
  )
  variables = jax.tree.map(jnp.asarray, quick.variables(cfg, 0, noise=0.1, bias=0.1))
  state = critic.begin(config.critic, variables, cfg, optimizer, where)
  one = learner.Learner(cfg, config, optimizer, state, where)
  pool = Pool(case.replay)
  for _ in range(2):
    scalars = one.update([one.credit(pool.group(i)) for i in range(3)])
  assert scalars['chunked_trees'] == 2 and scalars['padding'] > 0
  timings = ('train_s', 'tokens_per_s')
  return one, {name: value for name, value in scalars.items() if name not in timings}


@functools.cache
def alone(replay: bool, estimator: estimators.EstimatorConfig, critic: str):
  """`updates` of one device."""
  return updates(Case({}, replay, estimator, critic), sharding.ONE_DEVICE)


def run(case: Case) -> dict[str, Any]:
  where = sharding.make(sharding.MeshConfig(**case.mesh))
  one, scalars = updates(case, where)
  reference, want = alone(case.replay, case.estimator, case.critic)
  states = jax.device_get((one.state, reference.state))
  errors = relative_errors((states[0], scalars), (states[1], want))
  worst = max(errors, key=errors.get)
  spread = {len(x.sharding.device_set) for x in jax.tree.leaves(one.state.variables)}
  copy = {len(x.sharding.device_set) for x in jax.tree.leaves(one.variables())}
  return {
    'leaves': len(errors),
    'worst': [worst, errors[worst]],
    'devices': sorted(spread),
    'devices_of_copy': sorted(copy),
  }


def main(names):
  platforms.own_only()
  jax.config.update('jax_enable_x64', True)
  jax.config.update('jax_num_cpu_devices', 8)
  for name in names:
    print(json.dumps({'case': name, **run(CASES[name])}), flush=True)


if __name__ == '__main__':
  main(sys.argv[1:])
