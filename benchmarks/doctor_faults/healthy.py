"""Healthy runs of different configurations, in which nothing should be found."""

from __future__ import annotations

from benchmarks.doctor_faults import Healthy

_ADAM = {'rl.optimizer.name': 'adam', 'rl.optimizer.adam.learning_rate': 3e-4}
_LARGER = {
  'model.num_layers': 3,
  'model.embed_dim': 96,
  'sft.loop.steps': 400,
  'sft.optimizer.schedule.total_steps': 400,
  'sft.optimizer.schedule.decay_steps': 130,
  'rl.steps': 56,
}
_SMALLER = {**_LARGER, 'model.num_layers': 1, 'model.embed_dim': 64}

FAULTS = (  # without one; every list of runs has this name
  Healthy('cispo'),
  Healthy('grpo', config={'rl.learner.estimator': dict(kind='grpo')}),
  Healthy('dapo', config={'rl.learner.estimator': dict(kind='dapo')}),
  Healthy(
    'expert_iteration', config={'rl.learner.estimator': dict(kind='expert_iteration')}
  ),
  Healthy(
    'policy_gradient', config={'rl.learner.estimator': dict(kind='policy_gradient')}
  ),
  Healthy('adam', config=_ADAM),
  Healthy('larger_groups', config={'rl.group_size': 8, 'rl.steps': 56}),
  Healthy('more_groups', config={'rl.groups_per_step': 4, 'rl.steps': 56}),
  Healthy('strict_window', config={'rl.window': 1, 'rl.capacity': 8}),
  Healthy('greedy_window', config={'rl.window': None, 'rl.capacity': 12}),
  Healthy('no_refill', config={'rl.refill_factor': 1.0}),
  Healthy('two_passes', config={'rl.updates_per_batch': 2, 'rl.steps': 56}),
  Healthy('resumed', resumed=True),
  Healthy('loaded', loaded=True),
  Healthy('larger_model', job='whole', config=_LARGER),
  Healthy('smaller_model', job='whole', config=_SMALLER),
  Healthy('sft', job='sft'),
  Healthy('sft_adam', job='sft', config={'sft.optimizer.name': 'adam'}),
  Healthy('pretrain', job='pretrain'),
  Healthy('pretrain_resumed', job='pretrain', resumed=True),
)
