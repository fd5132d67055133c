"""Scripted rules: from a finding to one proposed change of the configuration.

A proposal is one field and its new value, within the bounds of its rule, and valid: the
whole config with it is built as the job itself would build it. Findings whose cause is
code, data or the machine have none.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from m2jax.evolve.doctor import causes, settings
from m2jax.evolve.doctor.finding import Finding

Build = Callable[[Mapping[str, Any]], Any]


@dataclasses.dataclass(frozen=True)
class Proposal:
  """One change.

  Attributes:
    field: dotted name in the config, as a flag `--config.FIELD` sets it.
    old, new: its values.
    reason: why, in a sentence.
    kind: the finding that it answers.
  """

  field: str
  old: Any
  new: Any
  reason: str
  kind: str


@dataclasses.dataclass(frozen=True)
class Rule:
  """How one field changes.

  Attributes:
    field: template, see `causes`.
    low, high: bounds of the new value; a number outside them is not proposed.
    reason: why.
    factor: the new value is the old one times this; of an integer rounded.
    value: the new value if there is no factor; not proposed if it is the old one.
    below: propose only if the old value is below this.
  """

  field: str
  low: float
  high: float
  reason: str
  factor: float | None = None
  value: Any = None
  below: float | None = None

  def new(self, old: Any) -> Any:
    """The new value; the old one if the rule does not apply."""
    number = type(old) in (int, float)
    if self.below is not None and not (number and old < self.below):
      return old
    if self.factor is None:
      return self.value
    if not number or not old:
      return old
    scaled = old * self.factor
    new = round(scaled) if type(old) is int else float(f'{scaled:.3g}')
    return new if self.low <= new <= self.high else old


_RATE = Rule(
  '{optimizer}.{rule}.learning_rate', 1e-8, 1.0, 'a third of the learning rate', 1 / 3
)
_CLIP = Rule('{optimizer}.clip_norm', 0, 1, 'clip gradients', value=1.0)
_CAPACITY = Rule('rl.capacity', 1, 1e6, 'a queue of half the items', 1 / 2)
_AGENTS = Rule('episodes.concurrency', 1, 1e5, 'half of the agents at once', 1 / 2)
_LONGER = Rule('rl.item_deadline_s', 1, 86_400, 'twice the time for an item', 2.0)
_BIAS = '{step}.bias_update_rate'
# Of each kind the first rule that applies and is valid is proposed.
RULES: Mapping[str, tuple[Rule, ...]] = {
  'not_finite': (_RATE, _CLIP),
  'loss_spike': (_RATE,),
  'loss_divergence': (_RATE,),
  'gradient_jump': (_RATE,),
  'entropy_collapse': (_RATE,),
  'entropy_explosion': (_RATE,),
  'ratio_drift': (
    Rule('rl.updates_per_batch', 1, 1e3, 'fewer updates on the same samples', 1 / 2),
    _RATE,
  ),
  'clipping': (
    Rule(
      'rl.learner.estimator.is_weight_max', 1, 5, "M2's bound", value=5.0, below=5.0
    ),
    _RATE,
  ),
  'expert_imbalance': (
    Rule(_BIAS, 1e-4, 1e-1, 'a router bias that follows', value=1e-3, below=1e-3),
    Rule(_BIAS, 1e-4, 1e-1, 'a router bias that follows faster', 3.0),
  ),
  'router_bias_frozen': (
    Rule(_BIAS, 1e-4, 1e-1, 'update the router bias', value=1e-3, below=1e-3),
    Rule(_BIAS, 1e-4, 1e-1, 'a router bias that follows faster', 3.0),
  ),
  'mismatch': (
    Rule('scheduler.reuse_stale_prefix', 0, 1, 'no keys of older weights', value=False),
    Rule('engine.record_experts', 0, 1, 'replay the experts of rollouts', value=True),
  ),
  'reward_absent': (
    Rule('rl.partial_credit', 0, 1, 'pay partly correct ends', value=0.5, below=0.5),
  ),
  'zero_advantage': (
    Rule('rl.group_size', 2, 256, 'larger groups differ more often', 2.0),
  ),
  'reward_sign': (
    Rule('rl.learner.reward.alpha', 0, 1, 'the default weight', value=0.1, below=0),
  ),
  'schedule_ended': (
    Rule('{optimizer}.schedule.final_fraction', 0, 1, 'a rate that stays', value=0.1),
  ),
  'success_falls': (
    Rule('rl.learner.reward.alpha', 0, 1, 'the default weight', value=0.1, below=0),
    _RATE,
  ),
  'length_growth': (
    Rule('episodes.agent.max_tokens', 16, 1e6, 'shorter responses', 1 / 2),
  ),
  'staleness': (_CAPACITY,),
  'infrastructure': (_AGENTS,),
  'throughput_drop': (_AGENTS,),
  'failed_items': (_LONGER,),
  'dead_worker': (Rule('roles.lease_s', 1, 3600, 'a longer lease', 2.0),),
  'window_blocked': (
    Rule('rl.item_deadline_s', 1, 86_400, 'stragglers end sooner', 1 / 2),
  ),
  'slow_storage': (
    Rule('rl.checkpoint_every', 1, 1e6, 'half of the checkpoints', 2.0),
  ),
}


def propose(
  findings: Iterable[Finding], config: Mapping[str, Any], build: Build
) -> Proposal | None:
  """The change for the first finding that has a valid one, in the order of `examine`.

  Args:
    findings: as `doctor.examine` returns them.
    config: the run's config.json.
    build: builds the job's config of nested dicts, and raises ValueError if it is not
      valid.
  """
  ordered = sorted(findings, key=causes.order)
  for found in ordered:
    for rule in RULES.get(found.kind, ()):
      field = causes.field_of(rule.field, found.phase, config)
      if not field:
        continue
      old = settings.get(config, field)
      new = rule.new(old)
      if (type(new), new) == (type(old), old) or not rule.low <= new <= rule.high:
        continue
      try:
        build(changed(config, field, new))
      except ValueError:
        continue
      return Proposal(field, old, new, rule.reason, found.kind)
  return None


def changed(config: Mapping[str, Any], field: str, value: Any) -> dict[str, Any]:
  """A copy of the config with another value of a field that it has."""
  out = copy.deepcopy(dict(config))
  *path, name = field.split('.')
  part = out
  for step in path:
    part = part[step]
  part[name] = value
  return out
