"""Acceptance of MTP drafts over RL: modules frozen, or trained with the policy.

  python -m benchmarks.drafts_in_rl --workdir=DIR [--seeds 0 1 2] [--json]

Starts from the model of `benchmarks.speculative` (pre-trained in DIR/pretrain, with its
three MTP modules). CISPO then moves the policy: prompts are pieces of held-out files,
and a response's reward is the share of its tokens that are in a random half of the
vocabulary, another one for each seed. In every update the same rollouts train

  frozen         no module
  cross-entropy  the modules on the sampled tokens, the loss of pre-training
  top-K KL       the modules on the trunk's distribution (`layers.draft_loss`), over its
                 K most likely words and the rest as one more
  renormalised   the same, over the K words alone

by the same optimizer. Neither loss has a gradient outside the modules, so all sides
have one policy; rounding differs between their programs, and the largest difference of
any weight of the trunk after an update is printed, after which the trunk of the first
side is copied to the others.

Before, in the middle of and after RL, an engine drafts three tokens at a time with the
modules of each side, for the same prompts and random numbers. Prints medians over
seeds. For the drafts: the share accepted at each position, given that all before it
were accepted; tokens per verification; and tokens/s relative to an engine without
drafts, which serves the same requests at about the same time. For the policy: mean
reward and entropy of that update's rollouts. Seeds whose results are in DIR are not
repeated.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, speculative
from m2jax import forest
from m2jax.config import ModelConfig
from m2jax.optim import AdamConfig, ByKind, MuonConfig, OptimizerConfig, optimizer
from m2jax.records import Completion, Trajectory
from m2jax.rl import learner as learner_lib
from m2jax.rl import rewards
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving import drafting
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.train import step as train_step

FROZEN, CROSS_ENTROPY = 'frozen', 'cross-entropy'
TOP_K_KL, RENORMALISED = 'top-K KL', 'renormalised'
SIDES = FROZEN, CROSS_ENTROPY, TOP_K_KL, RENORMALISED
POSITIONS = range(1, speculative.MODULES + 1)


def steps(args) -> dict[str, train_step.StepConfig]:
  """Settings of the sides that train; their losses are of the same form and size."""
  common = dict(micro_rows=args.groups, detach_mtp=True, draft_top_k=args.top_k)
  config = train_step.StepConfig
  return {
    TOP_K_KL: config(mtp_weight=0.0, draft_weight=1.0, **common),
    RENORMALISED: config(mtp_weight=0.0, draft_weight=1.0, draft_rest=False, **common),
    CROSS_ENTROPY: config(mtp_weight=1.0, draft_weight=0.0, **common),
  }


def make_learner(
  cfg: ModelConfig, variables, step: train_step.StepConfig, args
) -> learner_lib.Learner:
  row = args.prompt + args.group_size * args.new
  tx = optimizer.make(
    OptimizerConfig(
      by_kind=ByKind(matrix='muon', expert='muon'),
      muon=MuonConfig(learning_rate=10 * args.learning_rate),
      adam=AdamConfig(learning_rate=args.learning_rate),
      clip_norm=None,  # of all parameters: the modules would scale the trunk's gradient
    )
  )
  config = learner_lib.LearnerConfig(
    row_tokens=row,
    row_terms=args.group_size * args.new,
    buckets=forest.Buckets((row,), (row,)),
    reward=rewards.RewardConfig(alpha=0.0),
    step=step,
  )
  state = train_step.init_state(jax.tree.map(jnp.copy, variables), tx)
  return learner_lib.Learner(cfg, config, tx, state)


def parts(variables) -> tuple[Any, Any]:
  """The trunk's variables, and the modules'."""
  trunk = {k: {n: x for n, x in v.items() if n != 'mtp'} for k, v in variables.items()}
  return trunk, {k: v['mtp'] for k, v in variables.items()}


def joined(trunk, modules):
  return {k: {**v, 'mtp': modules[k]} for k, v in trunk.items()}


def follow(learners: Mapping[str, learner_lib.Learner]) -> float:
  """Copies the first side's trunk to the others; the largest difference there was."""
  first, *others = learners.values()
  trunk, gap = parts(first.state.variables)[0], 0.0
  for other in others:
    its, modules = parts(other.state.variables)
    gaps = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), trunk, its)
    gap = max(gap, *jax.tree.leaves(gaps))
    variables = joined(jax.tree.map(jnp.copy, trunk), modules)
    other.state = dataclasses.replace(other.state, variables=variables)
  return gap


class Rollouts:
  """Groups of responses to pieces of held-out files."""

  def __init__(self, scheduler: Scheduler, held_out, seed: int, args):
    self._scheduler, self._args = scheduler, args
    self._random = np.random.default_rng(seed)
    self._texts = [t for t in map(np.asarray, held_out) if len(t) > args.prompt]
    self._rewarded = self._random.random(args.vocabulary) < 0.5

  def prompts(self, number: int) -> list[np.ndarray]:
    out = []
    for i in self._random.choice(len(self._texts), number):
      start = self._random.integers(len(self._texts[i]) - self._args.prompt)
      out.append(self._texts[i][start : start + self._args.prompt])
    return out

  def groups(self) -> list[rewards.Group]:
    args = self._args
    handles = [
      [self._submit(prompt) for _ in range(args.group_size)]
      for prompt in self.prompts(args.groups)
    ]
    return [
      [self._judged(index, rank, *one) for rank, one in enumerate(group)]
      for index, group in enumerate(handles)
    ]

  def _submit(self, prompt):
    sampling = SamplingParams(self._args.new, seed=int(self._random.integers(2**31)))
    return prompt, self._scheduler.submit(GenerateRequest(prompt, sampling))

  def _judged(self, index: int, rank: int, prompt, handle):
    result, session = handle.future.result(), f'{index}.{rank}'
    success = float(self._rewarded[result.tokens].mean())
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
    trajectory = Trajectory(
      session, index, rank, 'half', 'half', 'length', success, 0.0, 0
    )
    return trajectory, [completion]


class Meter:
  """Serves the same requests with drafts of given weights, and without."""

  def __init__(self, cfg: ModelConfig, prompts: Sequence[np.ndarray], args):
    self._prompts, self._new = prompts, args.measured
    context = args.prompt + args.measured + 32
    config = EngineConfig(
      slots=args.slots,
      context_tokens=context,
      decode_rows=(args.slots,),
      prefill_shapes=((args.slots, args.prompt),),
      contexts=(context,),
    )
    self.plain = Engine(cfg, config)
    self._drafting = Engine(
      cfg, dataclasses.replace(config, draft_tokens=speculative.MODULES)
    )

  def serve(self, variables, drafts: int) -> tuple[float, dict[int, float]]:
    """tokens/s, and the acceptance by position, with a fixed number of drafts."""
    engine = self._drafting if drafts else self.plain
    config = SchedulerConfig(prefill_budget_tokens=4096, draft_tokens=drafts)
    scheduler = Scheduler(engine, variables, config=config).start()  # which warms up
    before, started = scheduler.stats(), time.perf_counter()
    handles = [
      scheduler.submit(GenerateRequest(prompt, SamplingParams(self._new, seed=i)))
      for i, prompt in enumerate(self._prompts)
    ]
    tokens = sum(len(handle.future.result().tokens) for handle in handles)
    seconds, stats = time.perf_counter() - started, scheduler.stats()
    scheduler.stop()
    return tokens / seconds, drafting.acceptance(stats, before)

  def measure(self, sides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Acceptance by position, tokens and relative speed of each side's variables."""
    plain, _ = self.serve(next(iter(sides.values())), 0)
    out = {}
    for name, variables in sides.items():
      speed, accepted = self.serve(variables, speculative.MODULES)
      shares = [accepted[i] for i in POSITIONS]
      tokens = 1 + float(np.sum(np.cumprod(shares)))
      out[name] = {'acceptance': shares, 'tokens': tokens, 'speed': speed / plain}
    return out


def run(cfg: ModelConfig, variables, held_out, seed: int, args) -> dict[str, Any]:
  """RL of one seed: measurements by update, and the metrics of every update."""
  started, initial = time.monotonic(), parts(variables)[1]
  learners = {n: make_learner(cfg, variables, s, args) for n, s in steps(args).items()}
  first = next(iter(learners.values()))
  meter = Meter(
    cfg, Rollouts(None, held_out, -seed - 1 + 2**31, args).prompts(args.requests), args
  )
  scheduler = Scheduler(meter.plain, variables).start()
  rollouts = Rollouts(scheduler, held_out, seed, args)

  def sides():
    trunk = parts(first.state.variables)[0]
    found = {name: parts(one.state.variables)[1] for name, one in learners.items()}
    found = {FROZEN: initial, **found}
    return {name: joined(trunk, found[name]) for name in SIDES}

  start = meter.measure({FROZEN: variables})[FROZEN]
  measured, history, gap = {0: dict.fromkeys(SIDES, start)}, [], 0.0
  print(f'seed {seed}: measured, {time.monotonic() - started:.0f} s', file=sys.stderr)
  for update in range(1, args.updates + 1):
    credits_ = [first.credit(group) for group in rollouts.groups()]
    metrics = {name: one.update(credits_) for name, one in learners.items()}
    gap = max(gap, follow(learners))
    scheduler.update_weights(first.variables(), update)
    history.append(metrics)
    if update in (args.updates // 2, args.updates):
      measured[update] = meter.measure(sides())
    seen = {
      k: metrics[TOP_K_KL][k]
      for k in ('reward', 'entropy', 'draft_kl/1', 'draft_overlap/1')
    }
    shown = ', '.join(f'{k} {v:.3f}' for k, v in seen.items())
    print(
      f'seed {seed}, update {update}: {shown}, {time.monotonic() - started:.0f} s',
      file=sys.stderr,
    )
  scheduler.stop()
  return {'seed': seed, 'gap': gap, 'measured': measured, 'history': history}


def table(found: Sequence[Mapping[str, Any]]) -> str:
  """Medians over seeds by update and side, and tokens relative to each seed's start."""
  lines = [
    '| updates | reward, entropy | modules | accepted at 1, 2, 3 | tokens '
    '| start = 1 | speed |',
    '|---|---|---|---|---|---|---|',
  ]
  first, *others = sorted(found[0]['measured'], key=int)
  for update in (first, *others):
    policy = [one['history'][max(int(update) - 1, 0)][TOP_K_KL] for one in found]
    moved = ', '.join(
      f'{np.median([of[key] for of in policy]):.2f}' for key in ('reward', 'entropy')
    )
    for name in SIDES if others and update != first else SIDES[:1]:
      cells = [one['measured'][update][name] for one in found]
      shares = np.median([cell['acceptance'] for cell in cells], axis=0)
      starts = [one['measured'][first][name]['tokens'] for one in found]
      of_start = [c['tokens'] / s for c, s in zip(cells, starts, strict=True)]
      tokens, speed = (
        np.median([c[key] for c in cells]) for key in ('tokens', 'speed')
      )
      columns = [
        update,
        moved,
        'all' if update == first else name,
        ', '.join(f'{share:.3f}' for share in shares),
        f'{tokens:.3f}',
        f'{np.median(of_start):.2f} [{min(of_start):.2f}, {max(of_start):.2f}]',
        f'{speed:.2f}',
      ]
      lines.append('| ' + ' | '.join(columns) + ' |')
  return '\n'.join(lines)


def main() -> None:
  parser = harness.parser(__doc__, workdir=True)
  parser.add_argument('--layers', type=int, default=4, help='of the trunk')
  parser.add_argument('--steps', type=int, default=300, help='of pre-training')
  parser.add_argument('--files', type=int, default=400, help='to pre-train on')
  parser.add_argument('--updates', type=int, default=60, help='of RL')
  parser.add_argument('--groups', type=int, default=4, help='of an update')
  parser.add_argument('--group_size', type=int, default=8)
  parser.add_argument('--prompt', type=int, default=32, help='tokens')
  parser.add_argument('--new', type=int, default=32, help='tokens of a response')
  parser.add_argument('--learning_rate', type=float, default=5e-4, help="Adam's")
  parser.add_argument('--top_k', type=int, default=32, help='K of the top-K KL')
  parser.add_argument('--slots', type=int, default=32, help='of the engines')
  parser.add_argument('--requests', type=int, default=128, help='measured')
  parser.add_argument('--measured', type=int, default=64, help='tokens of each')
  args = parser.parse_args()
  args.workdir.mkdir(parents=True, exist_ok=True)
  cfg, variables, held_out = speculative.trained(args, args.workdir)
  args.vocabulary = cfg.vocab_size

  def shown(found):
    gap = max(one['gap'] for one in found)
    return (
      f'{table(found)}\n\nmedians over seeds {args.seeds}; the trunk of two sides '
      f'differed by at most {gap:.1e} after an update'
    )

  one = lambda _, seed, args: run(cfg, variables, held_out, seed, args)
  harness.run(args, ['rl'], one, shown)


if __name__ == '__main__':
  main()
