"""CISPO, GRPO, DAPO, policy gradient and expert iteration, 1 to 16 updates a batch.

  python -m benchmarks.estimators --workdir=DIR [--seeds 0 1 2] [--json]

Real rollouts and updates of a small M2. The task is to sort: a prompt has 2 to 7
digits, the response is to be the same digits in order, and an end token. The reward is
1 if all are right, else 0. Every fifth prompt, by hash, is held out: only evaluations
use it, neither phase of training does.

Supervised fine-tuning on sorted digits stops early, once for each seed; all runs of the
seed start from its weights. They see the same prompts in the same order and have the
same number of episodes and updates. With u updates a batch, u × GROUPS groups are
sampled by the same weights and trained in u parts, so part k is trained k − 1 updates
after it was sampled, as in M1's 16 rounds of off-policy updates
(docs/facts/algorithms.md §3). The advantages are G − B; GRPO's and DAPO's are divided
by the group's standard deviation. All have the same optimizer and learning rate.

The router's bias is updated in RL, as in the main job; the runs of `FROZEN` are
repeated with the bias frozen.

The first table has for each estimator and u, over seeds: success on held-out prompts at
half of the updates and at their end, its mean difference from CISPO of the same u and
seed with the 95 % interval of Student's t; and, over the last quarter of the updates
that trained anything, the share of clipped terms, the KL from the sampling policy, and
the entropy. The second table compares the frozen bias, with the expert load's MaxVio.
Cells are medians with the range over seeds. Results are lines of DIR/results.jsonl;
runs in that file are not repeated.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, windowed_fifo_rl
from m2jax import forest
from m2jax.optim import AdamConfig, ByKind, MuonConfig, OptimizerConfig, optimizer
from m2jax.records import Completion, Trajectory
from m2jax.rl import estimators, rewards
from m2jax.rl import learner as learner_lib
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.train import step as train_step

SHORTEST, LONGEST, DIGITS = 2, 7, 12  # digits of a prompt, and how many there are
BEGIN, ASK, END = 0, DIGITS + 1, DIGITS + 2  # tokens; digits are 1 … DIGITS
GROUPS, GROUP_SIZE = 8, 16  # of an update
ROW = 128  # tokens of a row: the tree of a group is smaller
FROZEN = (('cispo', 1), ('cispo', 16), ('grpo', 16))
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t, by number of seeds


class Run(NamedTuple):
  """One run: estimator, updates a batch, whether the bias is updated, and seed."""

  algorithm: str
  per_batch: int
  bias: bool
  seed: int


def held_out(prompt: np.ndarray) -> bool:
  return zlib.crc32(np.asarray(prompt, np.int32).tobytes()) % 5 == 0


def prompts(
  rng: np.random.Generator, of_held_out: bool = False
) -> Iterator[np.ndarray]:
  """Prompts of one of the two parts, without end."""
  while True:
    digits = rng.integers(1, DIGITS + 1, rng.integers(SHORTEST, LONGEST + 1))
    prompt = np.array([BEGIN, *digits, ASK], np.int32)
    if held_out(prompt) == of_held_out:
      yield prompt


def solution(prompt: np.ndarray) -> np.ndarray:
  return np.array([*np.sort(prompt[1:-1]), END], np.int32)


def group(index: int, prompt: np.ndarray, results: Sequence[Any]) -> rewards.Group:
  """A rollout group of results with `tokens`, `logprobs` and `versions`, judged."""
  out = []
  for rank, result in enumerate(results):
    session = f'{index}.{rank}'
    completion = Completion(
      id=f'{session}/0',
      session=session,
      turn=0,
      parent=None,
      fork_reason=None,
      prompt_ids=prompt,
      response_ids=result.tokens,
      logprobs=result.logprobs,
      versions=result.versions,
      finish_reason=result.finish_reason,
      status='ok',
    )
    success = float(np.array_equal(result.tokens, solution(prompt)))
    end = Trajectory(session, index, rank, 'sort', 'sort', 'answer', success, 0.0, 0)
    out.append((end, [completion]))
  return out


class Written(NamedTuple):
  """A solution in the form of an engine's result."""

  tokens: np.ndarray

  finish_reason = 'stop'

  @property
  def logprobs(self) -> np.ndarray:
    return np.zeros(len(self.tokens), np.float32)

  versions = logprobs


def submit(scheduler: Scheduler, prompt: np.ndarray, seed: int):
  """The handle of one sampled response."""
  sampling = SamplingParams(LONGEST + 2, seed=seed, stop_ids=(END,))
  return scheduler.submit(GenerateRequest(prompt, sampling))


class Trainer:
  """The engine, and a learner for each estimator and bias rate."""

  def __init__(self, args: argparse.Namespace):
    self._args, self._cfg = args, windowed_fifo_rl.model()
    slots = GROUPS * GROUP_SIZE
    self._engine = Engine(
      self._cfg,
      EngineConfig(
        slots=slots,
        context_tokens=32,
        decode_rows=(slots,),
        prefill_shapes=((slots, 16),),
        contexts=(32,),
      ),
    )
    self._learners: dict[tuple, learner_lib.Learner] = {}
    self._variables: dict[int, Any] = {}  # after SFT, by seed

  def run(self, run: Run) -> dict[str, Any]:
    """One run of RL."""
    args, started_s = self._args, time.monotonic()
    learner = self._learner(run.algorithm, run.bias, args.learning_rate)
    learner.state = self._state(self._tuned(run.seed), args.learning_rate)
    rng = prompts(np.random.default_rng((run.seed, 1)))
    history, metrics = [], []
    scheduler = Scheduler(self._engine, learner.variables(), 0).start()
    try:
      while learner.version < args.updates:
        if 2 * learner.version in (0, args.updates):
          history.append(self._evaluate(scheduler, run.seed))
        groups = self._sample(scheduler, rng, run, learner.version)
        for part in range(run.per_batch):
          judged = groups[part * GROUPS : (part + 1) * GROUPS]
          scalars = learner.update([learner.credit(g) for g in judged])
          metrics.append(scalars)
        scheduler.update_weights(learner.variables(), learner.version)
      history.append(self._evaluate(scheduler, run.seed))
    finally:
      scheduler.stop()
    names = 'clip_fraction', 'approx_kl', 'entropy', 'success', 'max_violation'
    trained = [m for m in metrics if 'entropy' in m]  # all groups may be equal
    last = trained[-args.updates // 4 :]
    return {
      **run._asdict(),
      'held_out': history,
      **{name: float(np.mean([m[name] for m in last])) for name in names},
      'seconds': time.monotonic() - started_s,
    }

  def _sample(self, scheduler: Scheduler, rng, run: Run, version: int) -> list:
    """The groups of one batch, sampled by the present weights."""
    asked = [next(rng) for _ in range(run.per_batch * GROUPS)]
    first = version * GROUPS * GROUP_SIZE  # the same seeds, whatever the batch
    handles = [
      submit(scheduler, prompt, (run.seed << 24) + first + i * GROUP_SIZE + rank)
      for i, prompt in enumerate(asked)
      for rank in range(GROUP_SIZE)
    ]
    results = [handle.future.result() for handle in handles]
    return [
      group(i, prompt, results[i * GROUP_SIZE : (i + 1) * GROUP_SIZE])
      for i, prompt in enumerate(asked)
    ]

  def _evaluate(self, scheduler: Scheduler, seed: int) -> float:
    """Success on held-out prompts, the same in all evaluations, one sample of each."""
    rng = prompts(np.random.default_rng((seed, 2)), of_held_out=True)
    asked = [next(rng) for _ in range(self._args.evaluated)]
    handles = [submit(scheduler, p, i) for i, p in enumerate(asked)]
    return float(
      np.mean(
        [
          np.array_equal(handle.future.result().tokens, solution(prompt))
          for prompt, handle in zip(asked, handles, strict=True)
        ]
      )
    )

  def _tuned(self, seed: int) -> dict[str, Any]:
    """The weights after SFT, as copies; made once and stored."""
    like = train_step.init_variables(self._cfg, jax.random.key(seed))
    path = self._args.workdir / f'sft_{seed}.npz'
    if seed not in self._variables and not path.exists():
      tuned = self._fine_tune(like, seed)
      np.savez(path, *map(np.asarray, jax.tree.leaves(tuned)))
    if seed not in self._variables:
      with np.load(path) as stored:
        leaves = [stored[f'arr_{i}'] for i in range(len(stored.files))]
      self._variables[seed] = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return jax.tree.map(jnp.asarray, self._variables[seed])

  def _fine_tune(self, variables: dict[str, Any], seed: int) -> dict[str, Any]:
    """Maximum likelihood of solutions: expert iteration on groups of one success."""
    rate = self._args.sft_rate
    learner = self._learner('expert_iteration', True, rate)
    learner.state = self._state(variables, rate)
    rng = prompts(np.random.default_rng((seed, 3)))
    for _ in range(self._args.sft_steps):
      asked = [next(rng) for _ in range(GROUPS * GROUP_SIZE // 2)]
      judged = [group(i, p, [Written(solution(p))]) for i, p in enumerate(asked)]
      learner.update([learner.credit(g) for g in judged])
    return learner.variables()

  def _state(self, variables, rate: float) -> train_step.TrainState:
    return train_step.init_state(variables, optimizer_of(rate))

  def _learner(self, algorithm: str, bias: bool, rate: float) -> learner_lib.Learner:
    key = algorithm, bias, rate
    if key not in self._learners:
      config = learner_lib.LearnerConfig(
        row_tokens=ROW,
        row_terms=ROW,
        buckets=forest.Buckets((ROW,), (ROW,)),
        estimator=estimators.make(algorithm),
        reward=rewards.RewardConfig(alpha=0.0),
        step=train_step.StepConfig(
          micro_rows=GROUPS, mtp_weight=0.0, bias_update_rate=1e-3 if bias else 0.0
        ),
      )
      tx = optimizer_of(rate)
      state = train_step.init_state(
        train_step.init_variables(self._cfg, jax.random.key(0)), tx
      )
      self._learners[key] = learner_lib.Learner(self._cfg, config, tx, state)
    return self._learners[key]


def optimizer_of(rate: float):
  return optimizer.make(
    OptimizerConfig(
      by_kind=ByKind(matrix='muon', expert='muon'),
      muon=MuonConfig(learning_rate=10 * rate),
      adam=AdamConfig(learning_rate=rate),
    )
  )


def planned(args: argparse.Namespace) -> list[Run]:
  """The runs, seed by seed: after an interruption the first seeds are complete."""
  out = []
  for seed in args.seeds:
    for per_batch in args.per_batch:
      out += [Run(kind, per_batch, True, seed) for kind in args.algorithms]
    out += [
      Run(kind, per_batch, False, seed)
      for kind, per_batch in FROZEN
      if kind in args.algorithms and per_batch in args.per_batch
    ]
  return out


def _cell(values: Sequence[float], digits: int = 2) -> str:
  low, middle, high = (
    f'{round(f(values), digits) + 0.0:.{digits}f}'  # no -0.00
    for f in (min, np.median, max)
  )
  return middle if low == high else f'{middle} [{low}, {high}]'


def _difference(runs: Sequence[Mapping], others: Sequence[Mapping]) -> str:
  """Mean difference in final success over common seeds, with its 95 % interval."""
  theirs = {r['seed']: r['held_out'][-1] for r in others}
  found = [r['held_out'][-1] - theirs[r['seed']] for r in runs if r['seed'] in theirs]
  if len(found) not in T_95:
    return ''
  half = T_95[len(found)] * np.std(found, ddof=1) / np.sqrt(len(found))
  return f'{np.mean(found):+.2f} ± {half:.2f}'


def tables(runs: Sequence[Mapping[str, Any]]) -> str:
  arms: dict[tuple, list[Mapping]] = {}
  for run in runs:
    key = run['per_batch'], run['algorithm'], run['bias']
    arms.setdefault(key, []).append(run)
  groups = {
    'Success': ['seeds', 'success, half', 'at the end', '− CISPO'],
    'Updates': ['clipped', 'KL', 'entropy'],
  }
  arm = ['updates a batch', 'estimator']
  head = [*arm, *(name for names in groups.values() for name in names)]
  lines = []
  for (per_batch, kind, bias), found in arms.items():
    if not bias:
      continue
    base = arms.get((per_batch, 'cispo', True), [])
    cells = [per_batch, kind, len(found)]
    cells += [_cell([r['held_out'][k] for r in found]) for k in (1, 2)]
    cells += ['' if kind == 'cispo' else _difference(found, base)]
    names = ('clip_fraction', 3), ('approx_kl', 4), ('entropy', 3)
    cells += [_cell([r[name] for r in found], digits) for name, digits in names]
    lines.append(cells)
  starts = {r['seed']: r['held_out'][0] for r in runs}
  shown = [harness.markdown(head, lines, groups)]
  shown.append(f'At the start: {_cell(list(starts.values()))}.')
  lines = []
  for (per_batch, kind, bias), found in arms.items():
    if (per_batch, kind, False) not in arms:
      continue
    cells = [per_batch, kind, 'updated' if bias else 'frozen']
    cells += [_cell([r['held_out'][-1] for r in found])]
    cells += ['' if bias else _difference(found, arms[per_batch, kind, True])]
    cells += [_cell([r['max_violation'] for r in found])]
    lines.append(cells)
  head = [*arm, 'bias', 'at the end', '− updated', 'MaxVio']
  return '\n\n'.join([*shown, harness.markdown(head, lines)])


def main() -> None:
  parser = harness.parser(__doc__, workdir=True)
  parser.add_argument('--algorithms', nargs='+', default=list(estimators.KINDS))
  parser.add_argument('--per_batch', type=int, nargs='+', default=[1, 4, 16])
  parser.add_argument('--updates', type=int, default=64, help='of a run')
  parser.add_argument('--sft_steps', type=int, default=110)
  parser.add_argument('--sft_rate', type=float, default=2e-3, help="Adam's, in SFT")
  parser.add_argument('--learning_rate', type=float, default=1e-4, help="Adam's")
  parser.add_argument('--evaluated', type=int, default=1024, help='held-out prompts')
  parser.add_argument('--tables', action='store_true', help='of the runs that are done')
  args = parser.parse_args()
  for per_batch in args.per_batch:
    if args.updates % (2 * per_batch):
      parser.error(f'--updates={args.updates} is no multiple of 2 × {per_batch}')
  args.workdir.mkdir(parents=True, exist_ok=True)
  kept = harness.Results(args.workdir / 'results.jsonl')
  given = harness.settings(args, ['algorithms', 'per_batch', 'tables'])
  trainer = functools.cache(lambda: Trainer(args))
  found = []
  for run in planned(args):
    key = [run._asdict(), given | {'normalise': 'own'}]
    if args.tables and key not in kept:
      continue
    found.append(kept.once(key, lambda run=run: trainer().run(run)))
    print(f'{run}: {found[-1]["held_out"]}', file=sys.stderr)
  harness.show(args, found, tables)


if __name__ == '__main__':
  main()
