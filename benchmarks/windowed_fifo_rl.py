"""Reinforcement learning under windowed FIFO, strict and greedy order.

  python -m benchmarks.windowed_fifo_rl --workdir=DIR [--seeds 0 1 2] [--json]

The simulation of `benchmarks.windowed_fifo` with real rollouts and updates: when an
item begins, the engine samples its group by the weights of that moment; when a batch is
taken, CISPO trains a small M2 on it, from random weights. Only latencies are simulated,
so that the result depends on the policy of scheduling and not on this machine.

The task is to recall codes. A prompt names one of the classes, each of which has a
random code of 1 to 8 tokens, its difficulty; the response has as many tokens, and its
reward is the share that is right. The latency of an item is that quantile of a
log-normal distribution, p99 = 10 × median, with noise of correlation ρ: hard items are
slow.

All runs of a seed see the same stream of items and start from the same weights. All
tokens of an item are sampled by the weights at its beginning, which makes it as stale
as its age. Every tenth update the policy is evaluated on all classes, by sampling.

Prints medians over seeds with their range: updates until the time limit, age in
versions (mean, largest), and the mean reward of all, of the easy (difficulty up to 2)
and of the hard (from 7) classes: at half of the time, at its end, and after the number
of updates that the slowest run of the seed made. Runs whose results are in DIR are not
repeated.
"""

from __future__ import annotations

import collections
import functools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, windowed_fifo
from benchmarks.windowed_fifo import Items, Policy, Simulation
from m2jax import config as model_config
from m2jax import forest
from m2jax.optim import AdamConfig, ByKind, MuonConfig, OptimizerConfig, optimizer
from m2jax.pool.windows import default_window
from m2jax.records import Completion, Trajectory
from m2jax.rl import learner as learner_lib
from m2jax.rl import rewards
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.train import step as train_step

LONGEST, WORDS = 8, 8  # tokens of a code, and the words that codes are made of
EASY, HARD = range(1, 3), range(7, LONGEST + 1)  # difficulties
PARTS = 'all', 'easy', 'hard'
_EVALUATE_EVERY, _EVALUATED = 10, 16  # updates, and samples of each class
_CONTEXT = 32  # positions of the engine


def model() -> model_config.ModelConfig:
  return model_config.ModelConfig(
    vocab_size=32,
    num_layers=2,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rotary_dim=8,
    num_experts=4,
    experts_per_token=2,
    expert_dim=64,
    max_positions=_CONTEXT,
    num_mtp_modules=0,
    dtype='float32',
    unroll_layers=True,
  )


class Codes:
  """The task: `classes` codes, whose lengths are spread evenly over 1 … 8."""

  def __init__(self, classes: int, seed: int):
    rng = np.random.default_rng(seed)
    self.difficulty = 1 + np.arange(classes) % LONGEST
    self._codes = rng.integers(1, 1 + WORDS, (classes, LONGEST))

  def prompt(self, of: int) -> np.ndarray:
    return np.array([0, 1 + WORDS + of], np.int32)

  def reward(self, of: int, response: np.ndarray) -> float:
    length = self.difficulty[of]
    return float((response == self._codes[of, :length]).mean())


def stream(codes: Codes, number: int, seed: int, correlation: float):
  """The items, and the class of each."""
  rng = np.random.default_rng(seed)
  of = rng.integers(len(codes.difficulty), size=number)
  return items(codes.difficulty[of], LONGEST, rng, correlation), of


def items(
  difficulty: np.ndarray, longest: int, rng: np.random.Generator, correlation: float
) -> Items:
  """Items of these difficulties, 1 … longest, with the latencies of the docstring."""
  quantiles = [(d - 0.5) / longest for d in range(1, longest + 1)]
  z = np.array([NormalDist().inv_cdf(q) for q in quantiles])[difficulty - 1]
  noise = rng.standard_normal(len(difficulty))
  z = correlation * z + math.sqrt(1 - correlation**2) * noise
  latency = np.exp(z * math.log(10) / NormalDist().inv_cdf(0.99))
  return Items(latency, difficulty.astype(float), difficulty.astype(float))


class Training(Simulation):
  """A simulation whose items are sampled and trained; see the module's docstring.

  Attributes:
    history: evaluations: (updates, time, mean reward of each class).
  """

  def __init__(self, *simulation, codes, classes, learner, scheduler, seed, group):
    super().__init__(*simulation)
    self._codes, self._classes, self._group = codes, classes, group
    self._learner, self._scheduler, self._seed = learner, scheduler, seed
    self._groups: dict[int, list] = {}  # handles, or results once the weights change
    self._sampling: list[int] = []  # items whose handles have not been awaited
    self.history: list[tuple[int, float, list[float]]] = []
    self.metrics: list[dict[str, float]] = []

  def begin(self, index: int) -> None:
    of = int(self._classes[index])
    seeds = [self._seed * 2**20 + index * self._group + r for r in range(self._group)]
    self._groups[index] = [self._submit(of, seed) for seed in seeds]
    self._sampling.append(index)

  def _submit(self, of: int, seed: int):
    sampling = SamplingParams(int(self._codes.difficulty[of]), seed=seed % 2**31)
    return self._scheduler.submit(GenerateRequest(self._codes.prompt(of), sampling))

  def update(self, batch: list[int]) -> None:
    for index in self._sampling:
      self._groups[index] = [h.future.result() for h in self._groups[index]]
    self._sampling = []
    learner = self._learner
    if learner.version % _EVALUATE_EVERY == 0:
      self.evaluate()
    credits_ = [learner.credit(self._judged(index)) for index in batch]
    scalars = learner.update(credits_)
    kept = 'reward', 'entropy', 'ratio', 'clip_fraction', 'policy/lag_mean'
    self.metrics.append({k: scalars[k] for k in kept if k in scalars})
    self._scheduler.update_weights(learner.variables(), learner.version)

  def evaluate(self) -> None:
    """Mean reward of each class, by sampling with the present weights."""
    handles = {
      of: [self._submit(of, -1 - i) for i in range(_EVALUATED)]
      for of in range(len(self._codes.difficulty))
    }
    found = [
      float(np.mean([self._codes.reward(of, h.future.result().tokens) for h in group]))
      for of, group in handles.items()
    ]
    self.history.append((self._learner.version, self.now, found))

  def _judged(self, index: int) -> rewards.Group:
    of, group = int(self._classes[index]), []
    for rank, result in enumerate(self._groups.pop(index)):
      session = f'{index}.{rank}'
      completion = Completion(
        id=f'{session}/0',
        session=session,
        turn=0,
        parent=None,
        fork_reason=None,
        prompt_ids=self._codes.prompt(of),
        response_ids=result.tokens,
        logprobs=result.logprobs,
        versions=result.versions,
        finish_reason=result.finish_reason,
        status='ok',
      )
      success = self._codes.reward(of, result.tokens)
      end = Trajectory(session, index, rank, 'code', 'code', 'length', success, 0.0, 0)
      group.append((end, [completion]))
    return group


class Trainer:
  """The engine and the learner, compiled once for all runs."""

  def __init__(self, args):
    self._cfg, row = model(), 2 + args.group_size * LONGEST
    self._engine = Engine(
      self._cfg,
      EngineConfig(
        slots=args.slots,
        context_tokens=_CONTEXT,
        decode_rows=(args.slots,),
        prefill_shapes=((args.slots, 16),),
        contexts=(_CONTEXT,),
      ),
    )
    self._tx = optimizer.make(
      OptimizerConfig(
        by_kind=ByKind(matrix='muon', expert='muon'),
        muon=MuonConfig(learning_rate=10 * args.learning_rate),
        adam=AdamConfig(learning_rate=args.learning_rate),
      )
    )
    config = learner_lib.LearnerConfig(
      row_tokens=row,
      row_terms=row,
      buckets=forest.Buckets((row,), (row,)),
      reward=rewards.RewardConfig(alpha=0.0),
      step=train_step.StepConfig(micro_rows=args.per_step, mtp_weight=0.0),
    )
    state = self._start(0)
    self._learner = learner_lib.Learner(self._cfg, config, self._tx, state)

  def _start(self, seed: int) -> train_step.TrainState:
    variables = train_step.init_variables(self._cfg, jax.random.key(seed))
    return train_step.init_state(jax.tree.map(jnp.copy, variables), self._tx)

  def run(self, policy: Policy, seed: int, args) -> dict[str, Any]:
    """One run, until the time limit."""
    self._learner.state = self._start(seed)
    codes = Codes(args.classes, seed)
    stream_, of = stream(codes, 20_000, seed, args.correlation)
    step = stream_.latency.mean() * args.per_step / args.capacity / args.load
    scheduler = Scheduler(self._engine, self._learner.variables()).start()
    started_s = time.monotonic()
    try:
      training = Training(
        *(stream_, policy, args.capacity, args.per_step, step),
        codes=codes,
        classes=of,
        learner=self._learner,
        scheduler=scheduler,
        seed=seed,
        group=args.group_size,
      )
      training.run(until=args.time)
      training.evaluate()
    finally:
      scheduler.stop()
    measured = windowed_fifo.measure(training, stream_)
    print(
      f'seed {seed}, {policy.name}: {len(training.batches)} updates, '
      f'{time.monotonic() - started_s:.0f} s',
      file=sys.stderr,
    )
    return {
      'seed': seed,
      'policy': policy.name,
      'updates': len(training.batches),
      'idle': measured['idle'],
      'age_mean': measured['age_mean'],
      'age_max': measured['age_max'],
      'difficulty': codes.difficulty.tolist(),
      'history': training.history,
      'metrics': training.metrics,
    }


def policies(capacity: int) -> list[Policy]:
  return [
    Policy('strict', 1),
    Policy('window 0.3', default_window(capacity)),
    Policy('greedy', None),
  ]


def rewards_at(run: Mapping[str, Any], key: int, limit: float) -> dict[str, float]:
  """Mean rewards of the classes, by part, interpolated.

  Args:
    key: 0 interpolates over updates, 1 over time.
    limit: the update or time to interpolate at.
  """
  x = [entry[key] for entry in run['history']]
  y = np.array([entry[2] for entry in run['history']])
  values = np.array([np.interp(limit, x, column) for column in y.T])
  difficulty = np.array(run['difficulty'])
  parts = {
    'all': difficulty > 0,
    'easy': np.isin(difficulty, EASY),
    'hard': np.isin(difficulty, HARD),
  }
  return {part: float(values[chosen].mean()) for part, chosen in parts.items()}


def table(runs: Sequence[Mapping[str, Any]], limit: float) -> str:
  by_policy, fewest = collections.defaultdict(list), {}
  for run in runs:
    by_policy[run['policy']].append(run)
    seed = run['seed']
    fewest[seed] = min(fewest.get(seed, run['updates']), run['updates'])

  def cell(values: Sequence[float], digits: int = 2) -> str:
    low, middle, high = (f'{f(values):.{digits}f}' for f in (min, np.median, max))
    return middle if low == high else f'{middle} [{low}, {high}]'

  speed, reward = [], []
  for policy, found in by_policy.items():
    speed.append(
      [
        policy,
        cell([r['updates'] for r in found], 0),
        cell([100 * r['idle'] for r in found], 1),
        cell([r['age_mean'] for r in found], 1),
        cell([r['age_max'] for r in found], 0),
      ]
    )
    for name, key, where in (
      ('half the time', 1, lambda run: limit / 2),
      ('the end', 1, lambda run: limit),
      ('equal updates', 0, lambda run: fewest[run['seed']]),
    ):
      measured = [rewards_at(run, key, where(run)) for run in found]
      columns = [cell([m[part] for m in measured]) for part in PARTS]
      reward.append([policy, name, *columns])
  return '\n\n'.join(
    [
      'Throughput and age:',
      harness.markdown(['policy', 'updates', 'idle %', 'age', 'largest'], speed),
      'Reward:',
      harness.markdown(['policy', 'at', *PARTS], reward),
    ]
  )


def main() -> None:
  parser = harness.parser(__doc__, workdir=True)
  parser.add_argument('--capacity', type=int, default=32, help='N, in groups')
  parser.add_argument('--per_step', type=int, default=8, help='groups of an update')
  parser.add_argument('--group_size', type=int, default=16)
  parser.add_argument('--classes', type=int, default=16)
  parser.add_argument('--correlation', type=float, default=0.9, help='ρ')
  parser.add_argument('--load', type=float, default=1.0)
  parser.add_argument('--time', type=float, default=100.0, help='in median latencies')
  parser.add_argument('--learning_rate', type=float, default=2e-3, help="Adam's")
  parser.add_argument('--slots', type=int, default=128, help='of the engine')
  parser.add_argument('--policies', nargs='+', help='names; all by default')
  args = parser.parse_args()
  by_name = {policy.name: policy for policy in policies(args.capacity)}
  trainer = functools.cache(lambda: Trainer(args))
  harness.run(
    args,
    args.policies or list(by_name),
    lambda name, seed, args: trainer().run(by_name[name], seed, args),
    lambda runs: table(runs, args.time),
    ['policies'],
  )


if __name__ == '__main__':
  main()
