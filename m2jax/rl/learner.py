"""The learner: assigns credit to rollout groups and trains the policy on them.

Groups, as records → rewards and advantages (`credit`) → samples → prefix forest → loss
(+ MTP) (`update`, one version of the policy; design §2). It imports no HTTP, database
or tokenizer. Groups of any size are trained: trees that do not fit into rows go through
`train.chunks`, in the same update.

In several processes one of them packs an update (`pack`), each gets its own part of the
rows (`parts`), and all train it (`train`).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from m2jax import forest
from m2jax import sharding as sharding_lib
from m2jax.checks import require
from m2jax.config import ModelConfig
from m2jax.records import Completion, Lineages
from m2jax.rl import (
  agreement,
  critic,
  distillation,
  estimators,
  inputs,
  packing,
  rewards,
  samples,
)
from m2jax.rl import terms as terms_lib
from m2jax.rl.estimators import cispo
from m2jax.sharding import ONE_DEVICE, Sharding
from m2jax.train import chunks
from m2jax.train import hosts as hosts_lib
from m2jax.train import step as train_step


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
  """How groups become an update.

  Attributes:
    row_tokens, row_terms: S and M of the forest's rows; together with
      `step.micro_rows` the one compiled shape of rows.
    buckets: shapes of the chunks for groups too large for rows (`rl.packing`); the
      stack has to hold the longest path.
    estimator: the estimator of the policy gradient, with its parameters: the `Config`
      of a module of `rl.estimators` or of an import path.
    reward: the composite reward.
    distillation: teachers, whose distributions the policy is drawn to.
    critic: learned values, in place of the reward's `baseline`; the reward's
      `normalise` is then 'none', its default, or 'batch'.
    step: train-step settings; MTP is detached from the policy (m2-and-forge.md §3). For
      an engine that drafts, Forge's loss is `mtp_weight=0` with a `draft_weight`.
    shuffle_rewards: a control that permutes success over each group's trajectories, and
      the rewards of turns over all paid turns of the group: only the association of
      behaviour and reward is lost. Without paid turns, a group without advantage still
      has none.
  """

  row_tokens: int = 1024
  row_terms: int = 1536
  buckets: forest.Buckets = forest.Buckets((1024,), (4096,), terms_per_token=2)
  estimator: estimators.EstimatorConfig = cispo.Config()
  reward: rewards.RewardConfig = rewards.RewardConfig()
  distillation: distillation.DistillationConfig = distillation.DistillationConfig()
  critic: critic.CriticConfig = critic.CriticConfig()
  step: train_step.StepConfig = train_step.StepConfig(detach_mtp=True)
  shuffle_rewards: bool = False

  def __post_init__(self):
    # Chunks must be able to hold whatever rows hold.
    if self.buckets.stack_tokens[-1] < self.row_tokens:
      raise ValueError(
        f'LearnerConfig.buckets.stack_tokens={self.buckets.stack_tokens}: the largest '
        f'must be at least row_tokens={self.row_tokens}'
      )

    if self.critic.kind:
      fits = self.reward.normalise != 'group'
      require(self.reward, fits, 'normalise', "'none' or 'batch' with a critic")
      fits = not self.estimator.own_credit
      require(self.estimator, fits, 'kind', 'one that takes advantages, with a critic')

  @property
  def learns_from_one(self) -> bool:
    """Whether a trajectory alone in its group is trained."""
    without = self.reward.baseline == 'none' or self.estimator.own_credit
    return bool(self.critic.kind or without or self.distillation.directories)

  @property
  def reward_of_estimator(self) -> rewards.RewardConfig:
    """The reward, with the estimator's scale unless it has its own; with a critic its
    advantages are returns."""
    if self.critic.kind:
      return dataclasses.replace(self.reward, baseline='none', normalise='none')
    if self.reward.normalise is not None:
      return self.reward
    return dataclasses.replace(self.reward, normalise=self.estimator.normalise)


@dataclasses.dataclass(frozen=True)
class Objective:
  """The loss of a forest's terms [B, M], and its off-policy metrics.

  A `train.step.Objective`: the estimator's, that of the teachers if there are any, and
  that of a critic on the policy's trunk.
  `inputs`, `distillation.Teachers` and `critic` fill what they need of the batch.
  """

  estimator: estimators.EstimatorConfig = cispo.Config()
  distillation: distillation.DistillationConfig = distillation.DistillationConfig()
  critic: critic.CriticConfig = critic.CriticConfig()

  @property
  def needs_entropy(self) -> bool:
    return 'entropy' in self.estimator.inputs

  @property
  def detach_value(self) -> bool:
    return self.critic.kind == 'detached'

  def __call__(
    self,
    logprob: jax.Array,
    batch: forest.Forest,
    entropy: jax.Array | None = None,
    teacher_kl: jax.Array | None = None,
    value: jax.Array | None = None,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    terms, teachers = terms_lib.of(logprob, batch, entropy), self.distillation
    if teachers.reward_weight != 1:
      terms = terms._replace(advantage=teachers.reward_weight * terms.advantage)
    metrics = self.estimator.metrics(terms) | agreement.measure(logprob, batch)
    if terms.reference_logprob is not None:
      metrics['reference_kl'] = jnp.sum(terms_lib.reference_kl(terms, 'k3'))
    loss = jnp.sum(self.estimator.penalised(terms))
    if teachers.directories:
      taught, sums = distillation.loss(teachers, logprob, batch, teacher_kl)
      loss, metrics = loss + taught, metrics | sums
    if value is not None:
      loss += critic.loss(self.critic, value, batch)
    return loss, metrics


class Packed(NamedTuple):
  """Groups that are ready to be trained, as one version of the policy.

  Attributes:
    batch: rows and chunks; empty if no group has an advantage.
    metrics: the groups' metrics.
    tokens: tokens of all hosts after merging.
    pack_s: seconds spent on it.
  """

  batch: packing.Batch
  metrics: Mapping[str, float] = {}
  tokens: int = 0
  pack_s: float = 0.0


class Learner:
  """Owns the train state; `update` is called from one thread.

  Attributes:
    state: the train state; `update` donates it, so do not hold a reference. Its step
      counts versions, that is calls of `update`, not passes.
    version: policy version of the state: updates since the start of RL.
    lineages: histories of the weights that sampled the training data.
    hosts: the part of the rows that this process trains.
  """

  def __init__(
    self,
    cfg: ModelConfig,
    config: LearnerConfig,
    optimizer: optax.GradientTransformation,
    state: train_step.TrainState,
    sharding: Sharding = ONE_DEVICE,
    served: Callable[[Any], Any] = sharding_lib.local_copy,
    teachers: Mapping[str, distillation.Teacher] = {},
  ):
    """Takes the state over and places it on the mesh of `sharding`.

    With several processes all of them make a learner, from the same arguments.

    Args:
      cfg: the model.
      config: settings.
      optimizer: the state's optimizer.
      state: the state to start from; with a critic, that of `critic.begin`.
      sharding: the mesh.
      served: maps the state's variables to what `variables` returns.
      teachers: those of `config.distillation`.

    Raises:
      ValueError: model or row_tokens do not divide over the mesh, or a teacher does not
        fit (`distillation.Teachers`).
    """
    config = dataclasses.replace(config, step=config.step.on(sharding))
    self._config, self._served = config, served
    self._critic = critic.Critic(
      *(config.critic, config.reward, cfg, config.step, optimizer, sharding)
    )
    cfg = critic.policy_model(config.critic, cfg)
    self.state = train_step.place_state(state, cfg, optimizer, sharding)
    self.lineages = Lineages()
    self.hosts = hosts_lib.find(sharding)
    self._estimator, self._reward = config.estimator, config.reward_of_estimator
    self._inputs = inputs.Inputs(
      self._estimator.inputs, cfg, config.step, sharding, self.state
    )
    self._teachers = distillation.Teachers(
      config.distillation, cfg, config.step, sharding, teachers
    )
    objective = Objective(self._estimator, config.distillation, config.critic)
    self._step = train_step.make_step(
      cfg,
      optimizer,
      objective,
      config.step,
      sharding,
      mean=False,  # the weights contain the normaliser of the batch
      feed=chunks.feed(cfg, objective),
    )

  @property
  def version(self) -> int:
    return int(self.state.step)

  def variables(self) -> Any:
    """The weights for the engine; by default a copy on one device of this process.

    With several processes all of them must call it.
    """
    return self._served(critic.without_head(self.state.variables))

  def credit(self, group: rewards.Group) -> rewards.GroupCredit:
    """Computes rewards and advantages of a group, the input of `update`."""
    if self._config.shuffle_rewards:
      group = _shuffle_rewards(group)
    credit = self._estimator.credit(rewards.advantages(group, self._reward))
    credit = critic.credit(self._config.critic, credit)
    return distillation.credit(self._config.distillation, credit)

  def update(
    self, credits_: Sequence[rewards.GroupCredit], passes: int = 1
  ) -> dict[str, float]:
    """Trains on groups: one version, with `passes` optimizer steps on the same batch.

    All passes use the recorded log-probabilities of the sampling policy, so from the
    second pass on the ratios include the changes of earlier passes; metrics are those
    of the last pass. A batch without a non-zero advantage does not change the weights
    but still counts as a version, so that every version has a metrics record.

    Returns:
      Scalars for the metrics record of this version.

    `skipped` is the number of passes that changed nothing, since loss or gradient was
    not finite.
    """
    return self.train(self.pack(credits_), passes)

  def pack(self, credits_: Sequence[rewards.GroupCredit]) -> Packed:
    """Merges and packs groups for `train`."""
    started_s = time.monotonic()
    normaliser, teachers = self._estimator.normaliser, self._config.distillation
    credits_ = rewards.scaled(credits_, self._reward)
    groups_samples = samples.from_groups(
      *(credits_, normaliser, self._lags),
      'trajectory' in self._estimator.inputs or bool(self._config.critic.kind),
      teachers.number if teachers.directories else None,
    )
    metrics = dict(rewards.summary(credits_), **self._lag(credits_))
    batch = packing.pack(
      groups_samples,
      row_tokens=self._config.row_tokens,
      row_terms=self._config.row_terms,
      buckets=self._config.buckets,
    )
    if groups_samples:
      trained = list(itertools.chain.from_iterable(groups_samples))
      metrics |= _counts(trained, batch) | _trained(trained, credits_)
    return Packed(batch, metrics, batch.num_tokens, time.monotonic() - started_s)

  def parts(self, packed: Packed) -> list[Packed]:
    """The update as each host trains it: its own rows, and all chunks."""
    rows = self._config.step.micro_rows
    return [
      packed._replace(batch=part)
      for part in packing.parts(packed.batch, rows, self.hosts.count)
    ]

  def train(self, packed: Packed, passes: int = 1) -> dict[str, float]:
    """Trains on a packed update; see `update`.

    With several processes all of them call it, each with its host's part.
    """
    started_s, version = time.monotonic(), self.version + 1
    fetched, agreed, values, skipped = {}, {}, {}, 0.0
    if packed.batch.empty:
      logging.info('step %d: every group has zero advantage', version)
    else:
      batch = self._teachers.of(self._inputs.of_reference(packed.batch))
      batch, values = self._critic.advantages(self.state, batch)
      for _ in range(passes):
        batch = self._inputs.of_sequences(self.state, batch)
        own = self._critic.train(self.state.critic, batch)
        state = dataclasses.replace(self.state, critic=None)
        state, scalars = self._step(state, batch)
        self.state = dataclasses.replace(state, critic=own)
        fetched = distillation.finish(train_step.fetch(scalars))
        skipped += fetched['skipped']
        # Of the first pass, before the weights change.
        agreed = agreed or agreement.finish(fetched)
    step = jnp.full_like(self.state.step, version)
    self.state = dataclasses.replace(self.state, step=step)
    seconds = packed.pack_s + time.monotonic() - started_s
    return {
      **packed.metrics,
      **agreement.without_sums(fetched),
      **agreed,
      **values,
      'skipped': skipped,
      'forest_tokens': packed.tokens,
      'train_s': seconds,
      'tokens_per_s': passes * packed.tokens / seconds,
    }

  def _lags(self, completion: Completion) -> np.ndarray:
    """Updates since the weights that sampled each token of a response."""
    lineage, versions = completion.lineage, completion.versions
    return self.lineages.updates_between(lineage, versions, self.version)

  def _lag(self, credits_: Sequence[rewards.GroupCredit]) -> dict[str, float]:
    """Number of updates between the weights that sampled the tokens and these."""
    lags = [
      self._lags(c)
      for group in credits_
      for credit in group.credits
      for c in credit.completions
    ]
    if not lags:
      return {}
    lag = np.concatenate(lags)
    return {'policy/lag_mean': float(lag.mean()), 'policy/lag_max': float(lag.max())}


def _counts(
  batch_samples: Sequence[forest.Sample], batch: packing.Batch
) -> dict[str, float]:
  """Statistics of merging; `padding` is the fraction in the rows only."""
  counts = {
    'input_tokens': sum(len(s.tokens) for s in batch_samples),
    'chunked_trees': batch.chunked,
  }
  if batch.rows is not None:
    counts['padding'] = 1 - batch.rows.num_tokens / batch.rows.tokens.size
  if any(s.experts is not None for s in batch_samples):
    counts['replay/disagreement'] = forest.disagreement(batch_samples).rate
  return counts


def _trained(
  batch_samples: Sequence[forest.Sample], credits_: Sequence[rewards.GroupCredit]
) -> dict[str, float]:
  """Shares of the trained tokens that were sampled, and that are of prompts: by the
  recorded lengths of the prompts, so that a wrong loss mask shows."""
  kept = (credit for g in credits_ if not g.dropped for credit in g.credits)
  recorded = itertools.chain.from_iterable(credit.completions for credit in kept)
  total = prompts = 0
  for sample, completion in zip(batch_samples, recorded, strict=True):
    live = np.ones(len(sample.tokens) - sample.prompt_length, bool)
    if sample.weights is not None:
      live = np.asarray(sample.weights) != 0
    total += int(live.sum())
    room = max(0, len(completion.prompt_ids) - sample.prompt_length)
    prompts += int(live[:room].sum())
  share = prompts / max(total, 1)
  return {'trained/assistant': 1 - share, 'trained/prompt': share}


def _shuffle_rewards(group: rewards.Group) -> rewards.Group:
  """Permutes the rewards of the group's judged trajectories, deterministically."""
  judged = [t for t, _ in group if t.end_reason != 'infrastructure']
  rng = random.Random(','.join(t.session for t in judged))
  values = [t.success for t in judged]
  paid = [reward for t in judged for reward in t.rewards.values()]
  rng.shuffle(values)
  rng.shuffle(paid)
  successes, payments = iter(values), iter(paid)
  out = []
  for t, completions in group:
    if t.end_reason != 'infrastructure':
      earned = {id_: next(payments) for id_ in t.rewards}
      t = dataclasses.replace(t, success=next(successes), rewards=earned)
    out.append((t, completions))
  return out
