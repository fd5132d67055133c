"""SFT and RL on a token task with the project's engine, scheduler and learner.

With age d the engine always has the weights of d updates ago: the staleness of
asynchronous RL, constant. The CPU time of a run includes what it compiles, which the
first run with a learner does.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.claims import tasks
from m2jax import forest
from m2jax.config import ModelConfig
from m2jax.optim import AdamConfig, ByKind, MuonConfig, OptimizerConfig, optimizer
from m2jax.rl import critic, distillation, estimators, rewards
from m2jax.rl import learner as learner_lib
from m2jax.rollout.api import GenerateRequest, Handle, SamplingParams
from m2jax.rollout.engine import calls
from m2jax.rollout.engine import engine as engine_lib
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.sharding import ONE_DEVICE
from m2jax.train import step as train_step

SEEDS_OF_RUN = 2**24  # seeds of requests; evaluations have the upper half
_PAGE, _CHUNK = 4, 16
MODEL = ModelConfig(
  vocab_size=tasks.VOCABULARY,
  num_layers=2,
  embed_dim=64,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  rotary_dim=8,
  num_experts=4,
  experts_per_token=2,
  expert_dim=64,
  max_positions=64,
  num_mtp_modules=0,
  dtype='float32',
  unroll_layers=True,
)


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The size of every run of a row.

  Attributes:
    updates: number of updates, each on new groups.
    groups, size: groups of an update, and episodes of a group.
    sft_steps, sft_size, sft_rate: supervised fine-tuning before it: its steps, the
      demonstrations of each, and Adam's rate.
    evaluated: instances of an evaluation, one episode each.
  """

  updates: int = 100
  groups: int = 8
  size: int = 16
  sft_steps: int = 120
  sft_size: int = 80
  sft_rate: float = 2e-3
  evaluated: int = 512

  @property
  def episodes(self) -> int:
    return self.updates * self.groups * self.size


@dataclasses.dataclass(frozen=True)
class Sampler:
  """How the engine computes; the learner computes in float32.

  Attributes:
    dtype: the dtype of activations and K/V cache.
    head: 'float32' as M2's, or 'bfloat16': operands and logits are rounded.
    record_experts: the learner uses the experts that the engine chose.
  """

  dtype: str = 'float32'
  head: str = 'float32'
  record_experts: bool = False


class _RoundedHead(calls.Calls):
  """An engine's calls with logits in bfloat16."""

  def logits(self, params, hidden):
    head = params['params']['head'].astype(jnp.bfloat16)
    return (hidden.astype(jnp.bfloat16) @ head).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Arm:
  """What a run trains on, and how.

  Attributes:
    task: the task.
    estimator: a kind of `rl.estimators`.
    parameters: the estimator's fields, as items.
    reward: the reward; by default the verdict and the paid turns alone.
    age: updates by which the engine's weights are old.
    critic: learned values; none by default.
    single: every group is one episode, with as many more groups.
    sampler: how the engine computes.
    bias_update_rate: rate of the router's biases in RL.
    after: tasks that the updates are about instead, one after the other in equal parts.
    evaluated: tasks that are evaluated at the end beside `task`.
    teachers: domains, each with the task whose demonstrations its teacher has learned.
    distillation: how they teach; names of directories are not read.
    imitates: episodes are those of the domain's teacher, and all count as successes.
  """

  task: tasks.Task
  estimator: str = 'cispo'
  parameters: tuple[tuple[str, Any], ...] = ()
  reward: rewards.RewardConfig = rewards.RewardConfig(alpha=0.0)
  age: int = 0
  critic: critic.CriticConfig = critic.CriticConfig()
  single: bool = False
  sampler: Sampler = Sampler()
  bias_update_rate: float = 0.0
  after: tuple[tasks.Task, ...] = ()
  evaluated: tuple[tasks.Task, ...] = ()
  teachers: tuple[tuple[str, tasks.Task], ...] = ()
  distillation: distillation.DistillationConfig = distillation.DistillationConfig()
  imitates: bool = False


class Trainer:
  """Engines, learners and starts, made once for all runs of a row."""

  def __init__(self, sizes: Sizes):
    self.sizes, self.cfg = sizes, MODEL
    self._engines: dict[tuple, Engine] = {}
    self._learners: dict[tuple, learner_lib.Learner] = {}
    self._starts: dict[tuple, Any] = {}  # weights after SFT, on the host

  def run(
    self, arm: Arm, rate: float, seed: int, updates: int | None = None
  ) -> dict[str, Any]:
    """One run: success before and after it, of each update, and what it took.

    Args:
      updates: replaces the number of `sizes`.
    """
    wall_s, cpu_s = time.monotonic(), time.process_time()
    sizes = self.sizes
    updates = updates or sizes.updates
    groups, size = sizes.groups, sizes.size
    if arm.single:
      groups, size = groups * size, 1
    learner = self.learner(arm, rate, seed)
    rng = np.random.default_rng((seed, 1))
    scheduler = Scheduler(self.engine(arm), learner.variables(), 0).start()
    teachers = {
      domain: Scheduler(self.engine(arm), weights, 0).start()
      for domain, weights in self._teachers(arm, seed).items()
    }
    old, metrics, curve, index = deque(), [], [], 0
    try:
      start = self.evaluate(scheduler, arm.task, seed)
      for update in range(updates):
        task = arm.after[update * len(arm.after) // updates] if arm.after else arm.task
        asked = [task.instance(rng) for _ in range(groups)]
        first = seed * SEEDS_OF_RUN + index * size * task.turns
        episodes = sample(
          *(scheduler, task, asked, size, first), teachers if arm.imitates else {}
        )
        success = 1.0 if arm.imitates else None
        taken = [
          tasks.group(task, index + i, symbols, found, success)
          for i, (symbols, found) in enumerate(zip(asked, episodes, strict=True))
        ]
        index += groups
        curve.append(_right(task, asked, episodes))
        metrics.append(learner.update([learner.credit(g) for g in taken]))
        variables, version = learner.variables(), learner.version
        if arm.age:  # device arrays of the state are donated
          variables = jax.tree.map(np.asarray, variables)
        old.append((variables, version))
        if len(old) > arm.age:
          variables, version = old.popleft()
          scheduler.update_weights(jax.tree.map(jnp.asarray, variables), version)
      scheduler.update_weights(learner.variables(), learner.version + 1)
      end = self.evaluate(scheduler, arm.task, seed)
      ends = [self.evaluate(scheduler, task, seed) for task in arm.evaluated]
      taught = [self.evaluate(teachers[d], of, seed) for d, of in arm.teachers]
    finally:
      for one in (scheduler, *teachers.values()):
        one.stop()
    return {
      'seed': seed,
      'rate': rate,
      'start': start,
      'end': end,
      'ends': ends,
      'teacher': float(np.mean(taught)) if taught else 0.0,
      'mean': float(np.mean(curve)),
      'lowest': min(curve),
      'curve': [[i, y] for i, y in enumerate(curve)],
      'episodes': index * size,
      **of_metrics(metrics),
      'cpu_s': time.process_time() - cpu_s,
      'wall_s': time.monotonic() - wall_s,
    }

  def engine(self, arm: Arm) -> Engine:
    sampler, slots = arm.sampler, self.sizes.groups * self.sizes.size
    context = -(-arm.task.context_tokens // _PAGE) * _PAGE
    key = context, sampler
    if key not in self._engines:
      config = EngineConfig(
        slots=slots,
        context_tokens=context,
        page_tokens=_PAGE,
        decode_rows=(slots,),
        prefill_shapes=((slots, min(_CHUNK, context)),),
        contexts=(context,),
        record_experts=sampler.record_experts,
      )
      kind = calls.Calls if sampler.head == 'float32' else _RoundedHead
      with mock.patch.object(engine_lib, 'Calls', kind):
        cfg = dataclasses.replace(self.cfg, dtype=sampler.dtype)
        self._engines[key] = engine_lib.Engine(cfg, config)
    return self._engines[key]

  def learner(self, arm: Arm, rate: float, seed: int) -> learner_lib.Learner:
    """The learner of an arm, with the weights after SFT and no updates."""
    start = jax.tree.map(jnp.asarray, self._start(arm.task, seed))
    learner = self._learner(arm, rate, seed)
    learner.state = self._begin(arm, start, rate)
    return learner

  def evaluate(self, scheduler: Scheduler, task: tasks.Task, seed: int) -> float:
    """Share of right choices with the engine's weights, on instances of its own."""
    rng = np.random.default_rng((seed, 2))
    asked = [task.instance(rng) for _ in range(self.sizes.evaluated)]
    first = seed * SEEDS_OF_RUN + SEEDS_OF_RUN // 2
    return _right(task, asked, sample(scheduler, task, asked, 1, first))

  def _start(self, task: tasks.Task, seed: int) -> Any:
    key = task.demonstrated, seed
    if key not in self._starts:
      sizes, rng = self.sizes, np.random.default_rng((seed, 3))
      learner = self._learner(
        Arm(task.demonstrated, 'expert_iteration'), sizes.sft_rate, seed
      )
      learner.state = train_step.init_state(
        train_step.init_variables(self.cfg, jax.random.key(seed)),
        _optimizer(sizes.sft_rate),
      )
      for _ in range(sizes.sft_steps):
        groups = []
        for i in range(sizes.sft_size):
          symbols = task.instance(rng)
          shown = [*map(tasks.Response.written, task.demonstration(symbols, rng))]
          groups.append(tasks.group(task, i, symbols, [shown], success=1.0))
        learner.update([learner.credit(g) for g in groups])
      self._starts[key] = jax.tree.map(np.asarray, learner.variables())
    return self._starts[key]

  def _learner(self, arm: Arm, rate: float, seed: int) -> learner_lib.Learner:
    key = arm.estimator, arm.parameters, arm.reward, arm.critic
    key += arm.bias_update_rate, arm.task.context_tokens, rate
    teachers = {}
    if arm.distillation.directories:
      teachers = {
        domain: distillation.Teacher(self.cfg, weights)
        for domain, weights in self._teachers(arm, seed).items()
      }
      key += arm.distillation, seed
    if key not in self._learners:
      row = -(-self.sizes.size * arm.task.context_tokens // 32) * 32
      config = learner_lib.LearnerConfig(
        row_tokens=row,
        row_terms=row,
        buckets=forest.Buckets((row,), (row,)),
        estimator=estimators.make(arm.estimator, **dict(arm.parameters)),
        reward=arm.reward,
        critic=arm.critic,
        distillation=arm.distillation,
        step=train_step.StepConfig(
          micro_rows=self.sizes.groups,
          mtp_weight=0.0,
          bias_update_rate=arm.bias_update_rate,
        ),
      )
      like = train_step.init_variables(self.cfg, jax.random.key(0))
      state = self._begin(arm, like, rate)
      self._learners[key] = learner_lib.Learner(
        *(self.cfg, config, _optimizer(rate), state), teachers=teachers
      )
    return self._learners[key]

  def _teachers(self, arm: Arm, seed: int) -> dict[str, Any]:
    """The weights of each domain's teacher, on the device."""
    found = {domain: self._start(task, seed) for domain, task in arm.teachers}
    return jax.tree.map(jnp.asarray, found)

  def _begin(self, arm: Arm, variables: Any, rate: float) -> train_step.TrainState:
    return critic.begin(arm.critic, variables, self.cfg, _optimizer(rate), ONE_DEVICE)


def sample(
  scheduler: Scheduler,
  task: tasks.Task,
  asked: Sequence[np.ndarray],
  size: int,
  first_seed: int,
  of_domains: Mapping[str, Scheduler] = {},
) -> list[list[list[tasks.Response]]]:
  """`size` episodes of each instance, all at once: responses by group and episode.

  Args:
    of_domains: what samples in the domains that it has.
  """
  symbols = [one for one in asked for _ in range(size)]
  episodes: list[list[tasks.Response]] = [[] for _ in symbols]
  for turn in range(task.turns):
    handles = submit(
      *(scheduler, task, symbols, first_seed, turn, episodes), of_domains
    )
    for episode, handle in zip(episodes, handles, strict=True):
      episode.append(response(handle))
  return [episodes[i : i + size] for i in range(0, len(episodes), size)]


def submit(
  scheduler: Scheduler,
  task: tasks.Task,
  instances: Sequence[np.ndarray],
  first_seed: int,
  turn: int = 0,
  before: Sequence[Sequence[tasks.Response]] | None = None,
  of_domains: Mapping[str, Scheduler] = {},
) -> list[Handle]:
  """Requests a turn of one episode of each instance, after the responses `before`."""
  handles = []
  for i, symbols in enumerate(instances):
    by = of_domains.get(task.domain(symbols), scheduler)
    seed = (first_seed + i * task.turns + turn) % 2**31
    sampling = SamplingParams(task.max_tokens, seed=seed, stop_ids=(tasks.END,))
    prompt = task.prompt(symbols, [r.tokens for r in before[i]] if before else [])
    handles.append(by.submit(GenerateRequest(prompt, sampling)))
  return handles


def response(handle: Handle | tasks.Response) -> tasks.Response:
  """Waits for a response; returns one that is there."""
  if isinstance(handle, tasks.Response):
    return handle
  found = handle.future.result()
  return tasks.Response(
    *(found.tokens, found.logprobs, found.versions, found.finish_reason), found.experts
  )


def of_metrics(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
  """What a table shows of the learner's metrics: means over updates that trained, 0
  where there are none, `mismatch` in millinats; and `episode_s`, the time of episodes
  in the last quarter of all updates."""
  trained = [m for m in metrics if 'entropy' in m]
  names = {'clipped': 'clip_fraction', 'lag': 'policy/lag_mean', 'entropy': 'entropy'}
  names |= {'explained': 'value/explained_variance', 'mismatch': 'mismatch/mean'}
  names['rerouted'] = 'replay/rerouted'
  found = {k: [m[name] for m in trained if name in m] for k, name in names.items()}
  found['episode_s'] = [m['wall_s'] for m in metrics[-(-3 * len(metrics) // 4) :]]
  means = {k: float(np.mean(v)) if v else 0.0 for k, v in found.items()}
  return means | {'mismatch': 1000 * means['mismatch']}


def _right(task: tasks.Task, asked, episodes) -> float:
  found = [
    task.judge(symbols, [r.tokens for r in episode]).right
    for symbols, of_group in zip(asked, episodes, strict=True)
    for episode in of_group
  ]
  return float(np.mean(found))


def _optimizer(rate: float):
  return optimizer.make(
    OptimizerConfig(
      by_kind=ByKind(matrix='muon', expert='muon'),
      muon=MuonConfig(learning_rate=10 * rate),
      adam=AdamConfig(learning_rate=rate),
    )
  )
