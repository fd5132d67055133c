"""A critic: values of states, learned on the merged forest, in place of B.

The value of a term is that of the state that its token was sampled in, V(s): a linear
head on the final state of the token's parent. It is learned on the return, and the
difference is credited (GAE, arXiv:1506.02438). With term i + 1 after term i of a
trajectory, turn by turn:

  loss  weight · Σ w (V(s_i) − G_i)²          G_i the return-to-go of i's turn
  δ_i = r_i + γ_i V(s_{i+1}) − V(s_i)         Â_i = δ_i + γ_i λ_i Â_{i+1}

with w the term's own weight (`terms.weights`) and r_i paid at the last token of a turn.
γ is the reward's, at the end of a turn, and 1 within it; λ_i is λ at the end of a turn,
and within it 1 (`steps='turn'`) or λ ('token'). With λ = 1, Â = G − V(s_i). The target
is G whatever λ is, which has no bias: λ of the critic is 1 (VC-PPO, arXiv:2503.01491).
As r_i = G_i − γ_i G_{i+1}, both follow from d = G − V: δ_i = d_i − γ_i d_{i+1}.

Values of a batch are those of the weights before its update, constant over its passes:
a pass forward over the same rows and chunks (`passes`), since the terms of a trajectory
may be in several of them, each with a gradient pass of its own. A prefix that
trajectories share is computed once; each of its terms has its own G, so the loss of a
merged state is that of separate samples (laws 2 and 3).

Axes: B rows, M loss terms of a row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from m2jax import forest, model
from m2jax import params as params_lib
from m2jax.axes import Array, Float
from m2jax.checks import require
from m2jax.config import ModelConfig
from m2jax.optim import gnmr
from m2jax.rl import passes, rewards
from m2jax.rl import terms as terms_lib
from m2jax.rl.packing import Batch
from m2jax.sharding import Sharding
from m2jax.train import chunks
from m2jax.train import step as train_step

KINDS = '', 'shared', 'detached', 'separate'
STEPS = 'turn', 'token'
_READ = 'advantage', 'weight', 'term_trajectory', 'term_sample', 'term_offset'


@dataclasses.dataclass(frozen=True)
class CriticConfig:
  """A critic, which replaces the baseline of the group; off by default.

  Attributes:
    kind: '' is none. 'shared': a head on the policy's trunk, which learns values too;
      'detached': the same, but only the head learns them; 'separate': a head on a copy
      of the policy's trunk, with its own state of the optimizer.
    weight: factor of its loss.
    lam: λ, in [0, 1].
    steps: what λ decays by, 'turn' or 'token'.
    passes: those of a separate critic over a batch, for each pass of the policy.
  """

  kind: str = ''
  weight: float = 0.5
  lam: float = 1.0
  steps: str = 'turn'
  passes: int = 1

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.kind in KINDS, 'kind', f'one of {KINDS}')
    check(self.weight > 0, 'weight', 'positive')
    check(0 <= self.lam <= 1, 'lam', 'in [0, 1]')
    check(self.steps in STEPS, 'steps', f'one of {STEPS}')
    fits = self.passes == 1 or (self.passes > 1 and self.kind == 'separate')
    check(fits, 'passes', "at least 1, and 1 unless kind='separate'")

  @property
  def on_policy_trunk(self) -> bool:
    """Whether the head is a part of the policy's parameters."""
    return self.kind in ('shared', 'detached')


def policy_model(config: CriticConfig, cfg: ModelConfig) -> ModelConfig:
  """The policy as the learner trains it."""
  return dataclasses.replace(cfg, value_head=config.on_policy_trunk)


def own_model(cfg: ModelConfig) -> ModelConfig:
  """The model of a separate critic."""
  return dataclasses.replace(cfg, num_mtp_modules=0, value_head=True)


def begin(
  config: CriticConfig,
  variables: dict[str, Any],
  cfg: ModelConfig,
  optimizer: optax.GradientTransformation,
  sharding: Sharding,
) -> train_step.TrainState:
  """The state that RL starts from: the policy's variables, taken over, and a critic
  whose values are 0."""
  policy, own = policy_model(config, cfg), None
  if config.kind == 'separate':
    _, trunk = model.without_modules(cfg, variables)
    own = _with_head(jax.tree.map(jnp.copy, trunk), own_model(cfg))
    own = train_step.start_state(own, own_model(cfg), optimizer, sharding)
  if config.on_policy_trunk:
    variables = _with_head(variables, policy)
  state = train_step.start_state(variables, policy, optimizer, sharding)
  return dataclasses.replace(state, critic=own)


def _with_head(variables: dict[str, Any], cfg: ModelConfig) -> dict[str, Any]:
  shapes = params_lib.shapes(cfg)['params']
  head = {
    name: jnp.zeros(x.shape, x.dtype)
    for name, x in shapes.items()
    if name in params_lib.CRITIC
  }
  return {**variables, 'params': {**variables['params'], **head}}


def without_head(variables: dict[str, Any]) -> dict[str, Any]:
  """The variables that an engine serves."""
  params = variables['params']
  kept = {name: x for name, x in params.items() if name not in params_lib.CRITIC}
  return {**variables, 'params': kept}


def credit(config: CriticConfig, group: rewards.GroupCredit) -> rewards.GroupCredit:
  """The group, which is trained whatever its returns are if there is a critic."""
  if not config.kind or not any(c.completions for c in group.credits):
    return group
  credits_ = [dataclasses.replace(c, returns=True) for c in group.credits]
  return rewards.GroupCredit(tuple(credits_), '')


def loss(
  config: CriticConfig, value: Float[Array, 'B M'], batch: forest.Forest
) -> Float[Array, '']:
  """The critic's loss of a batch's terms."""
  value, returns = terms_lib.masked(batch.weight, value, batch.returns)
  return config.weight * jnp.sum(batch.weight * (value - returns) ** 2)


@dataclasses.dataclass(frozen=True)
class Objective:
  """A `train.step.Objective` of a separate critic."""

  config: CriticConfig

  def __call__(self, logprob, batch, value):
    del logprob
    return loss(self.config, value, batch), {}


class Critic:
  """Fills what a batch needs of values, and trains a separate critic."""

  def __init__(
    self,
    config: CriticConfig,
    reward: rewards.RewardConfig,
    cfg: ModelConfig,
    step: train_step.StepConfig,
    optimizer: optax.GradientTransformation,
    sharding: Sharding,
  ):
    """Compiles nothing yet.

    Args:
      config: the critic.
      reward: has γ, and whether the batch's deviation divides advantages.
      cfg: the policy's model.
      step, optimizer, sharding: as of the train step.
    """
    self._config, self._reward, self._cfg = config, reward, policy_model(config, cfg)
    self._step = None
    if config.kind == 'separate':
      self._cfg = own_model(cfg)
      step = dataclasses.replace(step, draft_weight=0.0, draft_top_k=0)
      objective = Objective(config)
      self._step = train_step.make_step(
        *(self._cfg, optimizer, objective, step, sharding),
        mean=False,
        feed=chunks.feed(self._cfg, objective),
      )
    self._passes = passes.Passes(self._cfg, step, sharding, _READ)

  def advantages(
    self, state: train_step.TrainState, batch: Batch
  ) -> tuple[Batch, dict[str, float]]:
    """A batch whose advantages are returns → with `returns`, and Â; and metrics."""
    if not self._config.kind:
      return batch, {}
    state = state.critic or state
    variables = gnmr.with_route(state.variables, state.opt_state)
    _, variables = model.without_modules(self._cfg, variables)
    rows, plan = (self._own_experts(part) for part in batch[:2])
    found = []
    if rows is not None:
      found.append(self._passes.of_rows(variables, rows))
    if plan is not None:
      found.append(self._passes.of_tree(variables, plan))
    gains = [self._gae(part) for part in found]
    if self._reward.normalise == 'batch':
      live = [g[part['weight'] != 0] for g, part in zip(gains, found, strict=True)]
      if (scale := np.std(np.concatenate(live))) > 1e-9:
        gains = [g / scale for g in gains]
    gains = [g.astype(found[0]['value'].dtype) for g in gains]
    rows, plan = batch[:2]
    if rows is not None:
      gain = self._passes.own(gains[0], rows)
      rows = dataclasses.replace(rows, returns=rows.advantage, advantage=gain)
    if plan is not None:
      tree = plan.tree
      tree = dataclasses.replace(tree, returns=tree.advantage, advantage=gains[-1])
      plan = dataclasses.replace(plan, tree=tree)
    return batch._replace(rows=rows, plan=plan), _metrics(found)

  def train(
    self, state: train_step.TrainState | None, batch: Batch
  ) -> train_step.TrainState | None:
    """A separate critic's state after a pass of the policy; the state is donated."""
    if self._step is None:
      return None
    rows, plan = (self._own_experts(part) for part in batch[:2])
    for _ in range(self._config.passes):
      state, _ = self._step(state, batch._replace(rows=rows, plan=plan))
    return state

  def _own_experts(self, part: Any) -> Any:
    """Rows or a plan, without the policy's experts if the critic has its own trunk."""
    if part is None or self._config.on_policy_trunk:
      return part
    if isinstance(part, forest.Plan):
      return dataclasses.replace(part, tree=self._own_experts(part.tree))
    return dataclasses.replace(part, experts=None)

  def _gae(self, of: Mapping[str, np.ndarray]) -> np.ndarray:
    """Â of terms in arrays of any shape, float64; 0 on padding."""
    out = np.zeros(of['weight'].shape)
    live = np.nonzero(of['weight'])
    keys = [of[name][live] for name in _READ[2:]]
    order = np.lexsort(keys[::-1])
    trajectory, sample, _ = (key[order] for key in keys)
    d = (of['advantage'][live].astype(np.float64) - of['value'][live])[order]
    gains = gae(d, trajectory, sample, self._reward.gamma, self._config)
    out[tuple(index[order] for index in live)] = gains
    return out


def gae(
  d: Float[np.ndarray, '*M'],
  trajectory: np.ndarray,
  turn: np.ndarray,
  gamma: float,
  config: CriticConfig,
) -> Float[np.ndarray, '*M']:
  """Â of terms in order of trajectory, turn and token.

  Args:
    d: G − V of each.
    trajectory, turn: numbers of each term's.
    gamma: discount per turn.
    config: has λ.

  Example:
    >>> one = np.zeros(2)
    >>> gae(np.array([1.0, 0.5]), one, np.arange(2), 1.0, CriticConfig(lam=0.0))
    array([0.5, 0.5])
  """
  last = np.diff(trajectory, append=-1) != 0  # of its trajectory
  ends = last | (np.diff(turn, append=-1) != 0)
  discount = np.where(last, 0.0, np.where(ends, gamma, 1.0))
  decays = ends | (config.steps == 'token')
  decay = discount * np.where(decays, config.lam, 1.0)
  delta = d - discount * np.append(d[1:], 0.0)
  out, following = [], 0.0
  for own, factor in zip(delta[::-1].tolist(), decay[::-1].tolist(), strict=True):
    following = own + factor * following
    out.append(following)
  return np.array(out[::-1])


def _metrics(found: list[dict[str, np.ndarray]]) -> dict[str, float]:
  """Means over the batch's terms times their weights, before the update."""
  flat = {
    name: np.concatenate([part[name].ravel() for part in found]).astype(np.float64)
    for name in ('weight', 'value', 'advantage')
  }
  weight, value, returns = flat.values()
  live = weight != 0
  mean = lambda x: float(np.average(x[live], weights=weight[live]))
  variance = lambda x: mean((x - mean(x)) ** 2)
  out = {'value/mean': mean(value), 'value/loss': mean((value - returns) ** 2)}
  if (spread := variance(returns)) > 0:
    out['value/explained_variance'] = 1 - variance(returns - value) / spread
  return out
