"""The window of the queue, by load and estimator, at equal episodes and at equal time.

The queue, the rules, the rollouts and the updates are real; latencies are simulated
(`benchmarks.windowed_fifo`), so that the result does not depend on this machine. An
instance has 1 to 6 places, and its verdict is the share of right ones; a longer
response has a longer latency: the quantile of its length in a log-normal distribution
with p99 = 10 × median, with noise of correlation 0.9. At load 1 the rollouts produce
just what the learner consumes.

All arms train the same number of episodes. `in equal time` is success at the time at
which the first of the condition's policies is done, interpolated between evaluations:
simulated time, of rollouts and learner. The age limit is what window 0.3 guarantees.
"""

from __future__ import annotations

import math
import time
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks.claims import tasks, training
from benchmarks.claims.aged import Config as Aged
from benchmarks.claims.claim import Claim
from benchmarks.claims.tasks import Forks
from benchmarks.claims.training import Arm, Sizes, Trainer
from benchmarks.windowed_fifo import Items, Policy, Simulation, age_bound
from m2jax.pool import windows
from m2jax.rollout.serving.scheduler import Scheduler

CAPACITY, CORRELATION, EVALUATIONS = 32, 0.9, 8
TASK = Forks(habits=(0.3, 0.4, 0.5, 0.6, 0.7, 0.8), graded=True, shortest=1)
SIZES = Sizes(updates=160, groups=4, size=16, evaluated=256)
SUBJECT = 'window 0.3'
LIMIT = age_bound(CAPACITY, windows.default_window(CAPACITY), SIZES.groups)
RULES: dict[str, windows.Window] = {
  'strict': 1,
  **{f'window {f:g}': math.floor(f * CAPACITY) for f in (0.1, 0.3, 0.5)},
  'greedy': None,
  'greedy, age limit': Aged(updates=LIMIT),
}
CONDITIONS = {
  f'load {load:g}, {kind}': (load, kind)
  for load in (0.3, 1.0)
  for kind in ('cispo', 'grpo')
}


class Training(Simulation):
  """A simulation whose items are sampled when they begin, and trained when taken."""

  def __init__(self, *simulation, trainer, learner, scheduler, instances, seed):
    super().__init__(*simulation)
    self._trainer, self._learner, self._scheduler = trainer, learner, scheduler
    self._instances, self._seed = instances, seed
    self._groups: dict[int, list] = {}
    self.curve: list[list[float]] = []
    self.metrics: list[dict[str, float]] = []

  def begin(self, index: int) -> None:
    size = self._trainer.sizes.size
    first = self._seed * training.SEEDS_OF_RUN + index * size
    self._groups[index] = training.submit(
      *(self._scheduler, TASK, [self._instances[index]] * size, first)
    )

  def update(self, batch: list[int]) -> None:
    # What has begun was sampled by the weights of its beginning.
    self._groups = {
      i: [training.response(r) for r in found] for i, found in self._groups.items()
    }
    learner, sizes = self._learner, self._trainer.sizes
    if learner.version % max(1, sizes.updates // EVALUATIONS) == 0:
      self.evaluate()
    groups = [
      tasks.group(TASK, i, self._instances[i], [[r] for r in self._groups.pop(i)])
      for i in batch
    ]
    self.metrics.append(learner.update([learner.credit(g) for g in groups]))
    self._scheduler.update_weights(learner.variables(), learner.version)

  def evaluate(self) -> None:
    found = self._trainer.evaluate(self._scheduler, TASK, self._seed)
    self.curve.append([float(self.now), found])


def stream(number: int, seed: int) -> tuple[Items, list[np.ndarray]]:
  """Instances, and their latencies: the same for all rules."""
  rng = np.random.default_rng((seed, 1))
  instances = [TASK.instance(rng) for _ in range(number)]
  places = np.array([len(symbols) for symbols in instances])
  # Quantiles of a standard normal distribution, by length.
  longest = len(TASK.habits)
  z = np.array([NormalDist().inv_cdf((n - 0.5) / longest) for n in places])
  noise = rng.standard_normal(number)
  z = CORRELATION * z + math.sqrt(1 - CORRELATION**2) * noise
  latency = np.exp(z * math.log(10) / NormalDist().inv_cdf(0.99))
  return Items(latency, places.astype(float), places.astype(float)), instances


def measure(trainer: Trainer, condition: str, arm: str, rate: float, seed: int):
  wall_s, cpu_s = time.monotonic(), time.process_time()
  (load, kind), sizes = CONDITIONS[condition], trainer.sizes
  of = Arm(TASK, kind)
  learner = trainer.learner(of, rate, seed)
  items, instances = stream(sizes.updates * sizes.groups + 2 * CAPACITY, seed)
  step = items.latency.mean() * sizes.groups / CAPACITY / load
  scheduler = Scheduler(trainer.engine(of), learner.variables(), 0).start()
  try:
    run = Training(
      *(items, Policy(arm, RULES[arm]), CAPACITY, sizes.groups, step),
      trainer=trainer,
      learner=learner,
      scheduler=scheduler,
      instances=instances,
      seed=seed,
    )
    run.run(sizes.updates)
    run.evaluate()
  finally:
    scheduler.stop()
  return {
    'start': run.curve[0][1],
    'end': run.curve[-1][1],
    'time': float(run.now),
    'idle': float(run.idle / run.now),
    'age': float(np.mean(run.ages)),
    'oldest': max(run.ages),
    'curve': run.curve,
    'episodes': sizes.episodes,
    **training.of_metrics(run.metrics),
    'cpu_s': time.process_time() - cpu_s,
    'wall_s': time.monotonic() - wall_s,
  }


def in_equal_time(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Adds success at the end of the fastest arm of the same condition and seed."""
  ends: dict[tuple, float] = {}
  for run in runs:
    key = run['condition'], run['seed']
    ends[key] = min(ends.get(key, math.inf), run['time'])
  return [
    run
    | {
      'equal_time': float(
        np.interp(ends[run['condition'], run['seed']], *np.array(run['curve']).T)
      )
    }
    for run in runs
  ]


CLAIM = Claim(
  name='window',
  question='A window of 0.3 N learns more than strict order and greedy order do.',
  conditions=tuple(CONDITIONS),
  arms=tuple(RULES),
  subject=SUBJECT,
  measure=measure,
  sizes=SIZES,
  metrics={'end': 'at equal episodes', 'equal_time': 'in equal time'},
  columns={'time': 'time', 'idle': 'idle', 'age': 'age', 'oldest': 'oldest'},
  finish=in_equal_time,
  x_label='time, in median latencies',
  at_scale='`--config.rl.window=1`, `default`, `greedy` or an import path with '
  '`configs/forge.py` on a pool of rollout hosts (docs/scheduling.md).',
)
