"""Two teachers into one student: on-policy distillation, SFT on their samples, RL.

  python -m benchmarks.distillation --workdir=DIR [--seeds 0 1 2] [--arms …] [--json]

Real rollouts and updates of a small M2. Prompts and held-out prompts are those of
`benchmarks.estimators`: 2 to 7 digits, here of two domains, which the last token of the
prompt names: the response is to be the digits in ascending or in descending order. The
two teachers are trained on solutions of one domain each (--teacher_steps), the student
briefly on those of both (--sft_steps), once for each seed. Then, from the student's
weights:

  sft      maximum likelihood of samples of the domain's teacher, right or wrong
  sampled  distillation alone, reverse KL on the tokens that the student samples
  top_k    distillation alone, reverse KL on the teacher's most likely words
  mixed    `sampled` beside CISPO's advantages
  cispo    the reward alone

All arms have the same prompts in the same order, episodes (--updates times GROUPS times
GROUP_SIZE) and updates, and the learning rate of --learning_rate, which is to be chosen
for each arm on other seeds. The table has success on held-out prompts of each domain,
medians with the range over seeds, before and after; and the teachers'. Results are
lines of DIR/results.jsonl; runs in that file are not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import estimators as sorting
from benchmarks import harness, windowed_fifo_rl
from m2jax import forest
from m2jax.rl import distillation, estimators, rewards
from m2jax.rl import learner as learner_lib
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.train import step as train_step

DOMAINS = 'up', 'down'
ARMS = 'sft', 'sampled', 'top_k', 'mixed', 'cispo'
GROUPS, GROUP_SIZE, ROW = sorting.GROUPS, sorting.GROUP_SIZE, sorting.ROW
ASK_DOWN = sorting.END + 1  # instead of ASK


def prompts(
  seed: Sequence[int], of_held_out: bool = False, domains: Sequence[str] = DOMAINS
) -> Iterator[tuple[str, np.ndarray]]:
  """Domains in turn, each with a prompt, without end."""
  found = sorting.prompts(np.random.default_rng(seed), of_held_out)
  while True:
    for domain in domains:
      prompt = next(found).copy()
      if domain == 'down':
        prompt[-1] = ASK_DOWN
      yield domain, prompt


def solution(domain: str, prompt: np.ndarray) -> np.ndarray:
  digits = np.sort(prompt[1:-1])
  return np.array([*(digits if domain == 'up' else digits[::-1]), sorting.END])


def group(
  index: int, domain: str, prompt: np.ndarray, results: Sequence[Any], taught: bool
) -> rewards.Group:
  """A rollout group, judged; `taught`: every response is to be imitated."""
  right = solution(domain, prompt)
  return [
    (
      dataclasses.replace(
        end,
        family=f'{domain}/sort',
        success=float(taught or np.array_equal(result.tokens, right)),
      ),
      turns,
    )
    for (end, turns), result in zip(
      sorting.group(index, prompt, results), results, strict=True
    )
  ]


class Trainer:
  """The engine, and the weights of each seed before the arms."""

  def __init__(self, args: argparse.Namespace):
    self._args, self._cfg = args, windowed_fifo_rl.model()
    slots = GROUPS * GROUP_SIZE
    shapes = dict(decode_rows=(slots,), prefill_shapes=((slots, 16),), contexts=(32,))
    self._engine = Engine(
      self._cfg, EngineConfig(slots=slots, context_tokens=32, **shapes)
    )
    self._imitates = functools.cache(lambda: self._learner('sft', {}))
    # Student and teachers, on the host: a learner's updates donate what it is given.
    self._start = functools.cache(
      lambda seed: jax.device_get(self._fit(seed, DOMAINS, args.sft_steps))
    )
    self._teacher = functools.cache(
      lambda seed, domain: jax.device_get(
        self._fit(seed, (domain,), args.teacher_steps)
      )
    )

  def run(self, arm: str, seed: int) -> dict[str, Any]:
    """One arm: held-out success by domain, before, after, and of the teachers."""
    args = self._args
    of = {domain: self._teacher(seed, domain) for domain in DOMAINS}
    learner = self._learner(arm, of)
    learner.state = self._state(self._start(seed), args.learning_rate)
    stream, imitates = prompts((seed, 1)), arm == 'sft'
    batches = [[next(stream) for _ in range(GROUPS)] for _ in range(args.updates)]
    found: dict[str, dict[str, float]] = {'teacher': {}}
    groups: list[list[rewards.Group]] = [[] for _ in batches]
    for domain in DOMAINS:
      with self._serving(_on_device(of[domain])) as scheduler:
        found['teacher'][domain] = self._evaluate(scheduler, seed)[domain]
        for update, asked in enumerate(batches if imitates else ()):
          own = [(i, *one) for i, one in enumerate(asked) if one[0] == domain]
          groups[update] += self._sample(scheduler, own, (seed, update), True)
    with self._serving(learner.variables()) as scheduler:
      found['before'] = self._evaluate(scheduler, seed)
      for update, asked in enumerate(batches):
        made = groups[update]
        if not imitates:
          every = [(i, *one) for i, one in enumerate(asked)]
          made = self._sample(scheduler, every, (seed, update), False)
        learner.update([learner.credit(one) for one in made])
        scheduler.update_weights(learner.variables(), learner.version)
      found['after'] = self._evaluate(scheduler, seed)
    return {'arm': arm, 'seed': seed, **found}

  @contextlib.contextmanager
  def _serving(self, variables: Any) -> Iterator[Scheduler]:
    scheduler = Scheduler(self._engine, variables, 0).start()
    try:
      yield scheduler
    finally:
      scheduler.stop()

  def _sample(self, scheduler: Scheduler, asked, at: tuple[int, int], taught: bool):
    """Groups of `asked`, (index, domain, prompt) each; `at` are seed and update."""
    first = (at[0] << 24) + at[1] * GROUPS * GROUP_SIZE
    handles = [
      sorting.submit(scheduler, prompt, first + index * GROUP_SIZE + rank)
      for index, _, prompt in asked
      for rank in range(GROUP_SIZE)
    ]
    results = [handle.future.result() for handle in handles]
    return [
      group(*one, results[i * GROUP_SIZE : (i + 1) * GROUP_SIZE], taught)
      for i, one in enumerate(asked)
    ]

  def _evaluate(self, scheduler: Scheduler, seed: int) -> dict[str, float]:
    """Success on held-out prompts of each domain, one sample of each."""
    stream = prompts((seed, 2), of_held_out=True)
    asked = [next(stream) for _ in range(self._args.evaluated)]
    handles = [sorting.submit(scheduler, p, i) for i, (_, p) in enumerate(asked)]
    right: dict[str, list[bool]] = {domain: [] for domain in DOMAINS}
    for (domain, prompt), handle in zip(asked, handles, strict=True):
      tokens = handle.future.result().tokens
      right[domain].append(np.array_equal(tokens, solution(domain, prompt)))
    return {domain: float(np.mean(found)) for domain, found in right.items()}

  def _fit(self, seed: int, domains: Sequence[str], steps: int) -> Any:
    """Weights after maximum likelihood of solutions, from one initialisation."""
    learner = self._imitates()
    variables = train_step.init_variables(self._cfg, jax.random.key(seed))
    learner.state = self._state(variables, self._args.sft_rate)
    stream = prompts((seed, 3), domains=domains)
    for _ in range(steps):
      asked = [next(stream) for _ in range(GROUPS * GROUP_SIZE // 2)]
      judged = [
        group(i, d, p, [sorting.Written(solution(d, p))], True)
        for i, (d, p) in enumerate(asked)
      ]
      learner.update([learner.credit(one) for one in judged])
    return learner.variables()

  def _state(self, variables, rate: float) -> train_step.TrainState:
    return train_step.init_state(_on_device(variables), sorting.optimizer_of(rate))

  def _learner(self, arm: str, teachers: Mapping[str, Any]) -> learner_lib.Learner:
    args = self._args
    rate = args.learning_rate if teachers else args.sft_rate
    how = distillation.DistillationConfig()
    if taught := arm in ('sampled', 'top_k', 'mixed'):
      how = distillation.DistillationConfig(
        teachers={domain: domain for domain in teachers},
        reward_weight=float(arm == 'mixed'),
        form='top_k' if arm == 'top_k' else 'sampled',
        top_k=args.top_k,
        weight=args.weight if arm == 'mixed' else 1.0,
      )
    of = {
      domain: distillation.Teacher(self._cfg, _on_device(weights))
      for domain, weights in teachers.items()
    }
    config = learner_lib.LearnerConfig(
      row_tokens=ROW,
      row_terms=ROW,
      buckets=forest.Buckets((ROW,), (ROW,)),
      estimator=estimators.make('expert_iteration' if arm == 'sft' else 'cispo'),
      reward=rewards.RewardConfig(alpha=0.0),
      distillation=how,
      step=train_step.StepConfig(micro_rows=GROUPS, mtp_weight=0.0),
    )
    state = self._state(train_step.init_variables(self._cfg, jax.random.key(0)), rate)
    return learner_lib.Learner(
      *(self._cfg, config, sorting.optimizer_of(rate), state),
      teachers=of if taught else {},
    )


def _on_device(variables: Any) -> Any:
  """A copy, which the learner may donate."""
  return jax.tree.map(jnp.array, variables)


def table(runs: Sequence[Mapping[str, Any]]) -> str:
  """Arms by domain; first the student before, and the teachers."""

  def cells(own, of):
    return [harness.spread([r[of][domain] for r in own], 2) for domain in DOMAINS]

  by_seed = list({r['seed']: r for r in runs}.values())
  lines = [
    ['student before', len(by_seed), *cells(by_seed, 'before')],
    ['teacher of the domain', len(by_seed), *cells(by_seed, 'teacher')],
  ]
  for arm in dict.fromkeys(r['arm'] for r in runs):
    own = [r for r in runs if r['arm'] == arm]
    lines.append([arm, len(own), *cells(own, 'after')])
  return harness.markdown(['success', 'seeds', *DOMAINS], lines)


def main() -> None:
  parser = harness.parser(__doc__, workdir=True)
  parser.add_argument('--arms', nargs='+', choices=ARMS, default=list(ARMS))
  parser.add_argument('--updates', type=int, default=64, help='of an arm')
  parser.add_argument('--sft_steps', type=int, default=80, help="the student's")
  parser.add_argument('--teacher_steps', type=int, default=300)
  parser.add_argument('--sft_rate', type=float, default=2e-3, help="Adam's, before")
  parser.add_argument('--learning_rate', type=float, default=3e-4, help="Adam's")
  parser.add_argument('--top_k', type=int, default=8)
  parser.add_argument('--weight', type=float, default=0.1, help="the KL's, in `mixed`")
  parser.add_argument('--evaluated', type=int, default=1024, help='held-out prompts')
  args = parser.parse_args()
  trainer = functools.cache(lambda: Trainer(args))
  measure = lambda arm, seed, _: trainer().run(arm, seed)
  harness.run(args, args.arms, measure, table, ['arms'])


if __name__ == '__main__':
  main()
