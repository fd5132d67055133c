"""On-policy distillation: a teacher's distribution on what the policy samples.

Each term with a teacher τ adds weight · w · ℓ to the loss, w being the term's own
weight (`terms.weights`) and π the policy:

  sampled  the gradient of ℓ is ρ (log π − log τ) ∇ log π of the sampled token, with the
           constants ρ = min(π/π_old, ratio_max) and a difference within ±20. Where
           π = π_old its mean over tokens of π is ∇ KL(π ‖ τ): −(log π − log τ) is an
           advantage of each token. Metric: the mean of log π − log τ.
  top_k    ℓ = KL(π ‖ τ) with the K most likely words of τ and all others as one
           (`layers.distillation`): a lower bound, whatever token was sampled, without
           its noise. The head computes K more columns. Metric: ℓ.

MiniLLM (arXiv:2306.08543) and GKD (arXiv:2306.13649) have the reverse KL on samples of
the policy. As in GKD a token is not credited with the divergence of the tokens after
it; that older weights have sampled its context is not corrected.

Both are sums over terms, so they do not depend on rows and chunks (law 2). A teacher's
pass is over the rows and chunks of the update, a shared prefix computed once
(`passes`); if one host reads all rows, over those with terms of this teacher only. It
chooses its own experts. Where terms of two teachers share a token, top_k uses the
higher numbered for the token; the other's terms are not distilled.

Axes: B rows, M loss terms, K words.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from m2jax import forest, model
from m2jax.checks import require
from m2jax.config import ModelConfig
from m2jax.rl import passes, rewards
from m2jax.rl import terms as terms_lib
from m2jax.rl.packing import Batch
from m2jax.sharding import Sharding
from m2jax.train import step as train_step

FORMS = 'sampled', 'top_k'
_SUM, _WEIGHT = 'distillation/sum/', 'distillation/weight/'


@dataclasses.dataclass(frozen=True)
class DistillationConfig:
  """Which teachers, and how the policy is drawn towards them.

  Attributes:
    teacher: a run's workdir, a directory of checkpoints, or one in the released format,
      with the policy's tokenizer; of domains that `teachers` does not name. '': they
      have none.
    teachers: domain (`Trajectory.domain`) → the same.
    weight: factor of the teachers' loss.
    reward_weight: factor of the advantages; 0: the teachers alone.
    form: 'sampled' or 'top_k'.
    top_k: K, some dozens at most.
    ratio_max: bound of the importance ratio of 'sampled'.
  """

  teacher: str = ''
  teachers: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
  weight: float = 1.0
  reward_weight: float = 1.0
  form: str = 'sampled'
  top_k: int = 16
  ratio_max: float = 2.0

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.weight > 0, 'weight', 'positive')
    check(self.reward_weight >= 0, 'reward_weight', 'at least 0')
    check(self.form in FORMS, 'form', f'one of {FORMS}')
    check(self.top_k >= 1, 'top_k', 'at least 1')
    check(self.ratio_max >= 1, 'ratio_max', 'at least 1')
    named = all(self.teachers) and all(self.teachers.values())
    check(named, 'teachers', "directories of domains; `teacher` is the others'")
    off = self.reward_weight == 1 or self.directories
    check(off, 'reward_weight', '1 without a teacher')

  @property
  def directories(self) -> dict[str, str]:
    """Domain → directory, of all teachers in the order of their numbers; '': others."""
    others = {'': self.teacher} if self.teacher else {}
    return {**others, **self.teachers}

  def number(self, domain: str) -> int:
    """The number of a domain's teacher, -1 if it has none."""
    names = list(self.directories)
    name = domain if domain in names else ''
    return names.index(name) if name in names else -1


class Teacher(NamedTuple):
  """A teacher's model, and its weights on the mesh of the learner."""

  model: ModelConfig
  variables: Any


def credit(
  config: DistillationConfig, group: rewards.GroupCredit
) -> rewards.GroupCredit:
  """The group, which is trained without a difference of rewards if it has a teacher."""
  taught = any(
    c.completions and config.number(c.trajectory.domain) >= 0 for c in group.credits
  )
  if not taught or group.dropped != 'zero_advantage':
    return group
  return dataclasses.replace(group, dropped='')


def loss(
  config: DistillationConfig,
  logprob: jax.Array,
  batch: forest.Forest,
  teacher_kl: jax.Array | None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of a batch's terms [B, M], and sums for `finish`."""
  teacher = jnp.asarray(batch.term_teacher)
  weight = jnp.where(teacher >= 0, jnp.asarray(batch.weight), 0)
  if config.form == 'top_k':
    assert teacher_kl is not None  # `Teachers.of` has filled the batch
    (value,) = terms_lib.masked(weight, teacher_kl)
    total = jnp.sum(weight * value)
  else:
    columns = logprob, batch.old_logprob, batch.teacher_logprob
    logprob, old_logprob, of_teacher = terms_lib.masked(weight, *columns)
    value = logprob - of_teacher
    ratio = jnp.exp(terms_lib.log_ratio(logprob, old_logprob))
    factor = jnp.minimum(ratio, config.ratio_max)
    factor *= terms_lib.log_ratio(logprob, of_teacher)
    total = jnp.sum(weight * jax.lax.stop_gradient(factor) * logprob)
  sums, value = {}, jax.lax.stop_gradient(value)
  for index, name in enumerate(config.directories):
    own = jnp.where(teacher == index, weight, 0)
    sums |= {
      _SUM + name: jnp.sum(own * value),
      _WEIGHT + name: jnp.sum(own, dtype=value.dtype),
    }
  return config.weight * total, sums


def finish(metrics: Mapping[str, float]) -> dict[str, float]:
  """The metrics, in which `distillation_kl/DOMAIN` is the mean of a teacher's terms.

  That of the domains without a teacher of their own is `distillation_kl/others`.
  """
  out = {}
  for key, value in metrics.items():
    if key.startswith(_SUM):
      name = key.removeprefix(_SUM)
      if total := metrics[_WEIGHT + name]:
        out[f'distillation_kl/{name or "others"}'] = value / total
    elif not key.startswith(_WEIGHT):
      out[key] = value
  return out


class Teachers:
  """Fills the fields of a batch that the loss reads."""

  def __init__(
    self,
    config: DistillationConfig,
    cfg: ModelConfig,
    step: train_step.StepConfig,
    sharding: Sharding,
    teachers: Mapping[str, Teacher],
  ):
    """Compiles nothing yet.

    Args:
      config: names the teachers.
      cfg: the policy.
      step, sharding: as of the train step.
      teachers: domain → teacher, as `config.directories`.

    Raises:
      ValueError: not the config's teachers, one of another vocabulary or that does not
        divide over the mesh, or a top_k above the vocabulary.
    """
    if list(teachers) != list(config.directories):
      raise ValueError(
        f'teachers of {list(teachers)}, not of {list(config.directories)}'
      )
    best = config.top_k if config.form == 'top_k' else 0
    if teachers and best > cfg.vocab_size:
      require(config, False, 'top_k', f'at most vocab_size={cfg.vocab_size}')
    self._teachers = []
    for name, teacher in teachers.items():
      if (theirs := teacher.model.vocab_size) != cfg.vocab_size:
        raise ValueError(
          f'the teacher {config.directories[name]} has vocab_size={theirs}, the policy '
          f'{cfg.vocab_size}: distillation needs the same tokens'
        )
      sharding.check(teacher.model)
      _, variables = model.without_modules(teacher.model, teacher.variables)
      scored = passes.Passes(teacher.model, step, sharding, best=best)
      self._teachers.append((scored, variables))
    self._best, self._dtype = best, jnp.promote_types(cfg.dtype, jnp.float32)

  def of(self, batch: Batch) -> Batch:
    """The batch with what the teachers give."""
    if not self._teachers:
      return batch
    rows, plan = batch.rows, batch.plan
    if rows is not None:
      rows = self._fill(rows, self._of_rows)
    if plan is not None:
      plan = dataclasses.replace(plan, tree=self._fill(plan.tree, self._of_tree(plan)))
    return batch._replace(rows=rows, plan=plan)

  def _of_rows(self, index: int, rows: forest.Forest):
    """The rows with terms of teacher `index`, and what it gives for them."""
    scored, variables = self._teachers[index]
    chosen = np.arange(len(rows.tokens))
    if scored.hosts.count == 1:  # else all hosts make the same passes
      chosen = np.flatnonzero(np.any(rows.term_teacher == index, axis=1))
    if not len(chosen):
      return chosen, {}
    some = forest.select(dataclasses.replace(rows, experts=None), chosen.tolist())
    found = scored.of_rows(variables, some)
    return chosen, {name: scored.own(x, some) for name, x in found.items()}

  def _of_tree(self, plan: forest.Plan):
    """`_of_rows` for the one row of a plan's tree."""
    plan = dataclasses.replace(plan, tree=dataclasses.replace(plan.tree, experts=None))

    def score(index: int, tree: forest.Forest):
      scored, variables = self._teachers[index]
      if not np.any(tree.term_teacher == index):
        return np.arange(0), {}
      return np.arange(1), scored.of_tree(variables, plan)

    return score

  def _fill(self, batch: forest.Forest, score) -> forest.Forest:
    """The batch with the teachers' fields, 0 where no term reads them."""
    teacher = np.asarray(batch.term_teacher)
    of_token = np.full(batch.tokens.shape, -1, np.int32)
    row = np.arange(len(teacher))[:, None]
    np.maximum.at(of_token, (row, batch.term_token), teacher)
    if self._best:
      shape = *of_token.shape, self._best
      words, logprobs = np.zeros(shape, np.int32), np.zeros(shape, self._dtype)
      owner, read = of_token, dict(zip(passes.BEST, (words, logprobs), strict=True))
      teacher = np.where(of_token[row, batch.term_token] == teacher, teacher, -1)
      filled = dict(zip(forest.TEACHER_TOKENS, (words, logprobs), strict=True))
      filled['term_teacher'] = teacher
    else:
      owner, read = teacher, {'logprob': np.zeros(teacher.shape, self._dtype)}
      filled = {'teacher_logprob': read['logprob']}
    for index in range(len(self._teachers)):
      chosen, found = score(index, batch)
      if found:
        at = np.nonzero(owner[chosen] == index)
        for name, whole in read.items():
          whole[chosen[at[0]], at[1]] = found[name][at]
    return dataclasses.replace(batch, **filled)
