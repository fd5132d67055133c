"""From an OptimizerConfig to an optax transformation.

Every kind of parameter (params.Kind) is updated by one of the rules that are fields of
OptimizerConfig: hidden matrices by the rule `name`, the others by Adam, unless
`by_kind` names another rule for a kind. This module has what rules share: clipping,
weight decay, the schedule, and the partition of the parameters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from m2jax import params as params_lib
from m2jax.checks import require
from m2jax.config import ModelConfig
from m2jax.optim import gnmr, schedules, sso
from m2jax.optim.adam import AdamConfig
from m2jax.optim.gnmr import GnmrConfig
from m2jax.optim.hyperball import HyperballConfig
from m2jax.optim.matrices import Matrices
from m2jax.optim.muon import MuonConfig
from m2jax.optim.nor_muon import NorMuonConfig
from m2jax.optim.rule import UpdateRule
from m2jax.optim.sso import MuonSphereConfig, SsoConfig
from m2jax.params import Kind
from m2jax.sharding import ONE_DEVICE, Sharding


@dataclasses.dataclass(frozen=True)
class ByKind:
  """Names of the rules that update each kind of parameter; a field for every Kind.

  Empty: the rule `OptimizerConfig.name` where the kind is one of its `HIDDEN`, or Adam.
  """

  embedding: str = ''
  head: str = ''
  norm: str = ''
  matrix: str = ''
  router: str = ''
  expert: str = ''


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """What updates the parameters. A field that is an UpdateRule adds an optimizer.

  Attributes:
    name: the field below that updates the hidden matrices (`UpdateRule.HIDDEN`).
    by_kind: names of fields, for kinds that are to be updated otherwise.
    adam, muon, …: settings of the rules; one that no kind names is not used.
    schedule: multiplier of every rule's learning rate, by step.
    weight_decay: decoupled, times the learning rate; on `weight_decay_kinds` only.
    weight_decay_kinds: names of kinds that decay.
    clip_norm: gradients are scaled to at most this global norm; None is off.
    gnmr: which layers of a model in low precision recover from it; off by default.
  """

  name: str = 'adam'
  by_kind: ByKind = ByKind()
  adam: AdamConfig = AdamConfig()
  muon: MuonConfig = MuonConfig()
  nor_muon: NorMuonConfig = NorMuonConfig()
  hyperball: HyperballConfig = HyperballConfig()
  sso: SsoConfig = SsoConfig()
  muon_sphere: MuonSphereConfig = MuonSphereConfig()
  schedule: schedules.ScheduleConfig = schedules.ScheduleConfig()
  weight_decay: float = 0.0
  weight_decay_kinds: tuple[str, ...] = ('matrix', 'expert', 'head', 'embedding')
  clip_norm: float | None = 1.0
  gnmr: GnmrConfig = GnmrConfig()

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.weight_decay >= 0, 'weight_decay', 'at least 0')
    check(self.clip_norm is None or self.clip_norm > 0, 'clip_norm', 'positive')
    known = tuple(str(kind) for kind in Kind)
    decaying = set(self.weight_decay_kinds)
    check(decaying <= set(known), 'weight_decay_kinds', f'among {known}')
    rules = _rules(self)
    check(self.name in rules, 'name', f'one of {tuple(rules)}')
    for kind in Kind:
      fitting = tuple(name for name, rule in rules.items() if kind in rule.KINDS)
      if (name := rule_of(self, kind)) not in fitting:
        raise ValueError(
          f'OptimizerConfig.by_kind.{kind}={name!r}: must be one of {fitting}'
        )


def rule_of(config: OptimizerConfig, kind: Kind) -> str:
  """Name of the rule that updates a kind of parameter."""
  hidden = kind in _rules(config)[config.name].HIDDEN
  return getattr(config.by_kind, kind) or (config.name if hidden else 'adam')


def rules_in_use(config: OptimizerConfig) -> dict[str, UpdateRule]:
  """Name → rule, of those that update some kind; in the order of the fields."""
  used = {rule_of(config, kind) for kind in Kind}
  return {name: rule for name, rule in _rules(config).items() if name in used}


def _rules(config: OptimizerConfig) -> dict[str, UpdateRule]:
  values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
  return {name: v for name, v in values.items() if isinstance(v, UpdateRule)}


def make(
  config: OptimizerConfig,
  model: ModelConfig | None = None,
  sharding: Sharding = ONE_DEVICE,
) -> optax.GradientTransformation:
  """The optimizer; `init` and `update` take trees that `params.kinds` knows.

  `update` needs `params` (weight decay). Gradients are clipped before anything else.

  Args:
    config: the rules.
    model: the parameters' model, for rules that split heads.
    sharding: the parameters' sharding. A rule that works on whole matrices exchanges
      parts of them between devices; without it the compiler would gather stacks of
      them.

  Raises:
    ValueError: a rule splits heads, and there is no model; or `gnmr` is on, and the
      model has one precision only.

  Example:
    >>> config = OptimizerConfig(by_kind=ByKind(matrix='muon', expert='muon'))
    >>> tx = make(config)
    >>> params = {'q': jax.numpy.ones((4, 8, 8)), 'final_norm': jax.numpy.ones(8)}
    >>> updates, state = tx.update(params, tx.init(params), params)
  """
  multiplier = schedules.multiplier(config.schedule)
  matrices = _matrices(model, sharding)

  def decays(params):
    return jax.tree.map(
      lambda kind: kind in config.weight_decay_kinds, params_lib.kinds(params)
    )

  def transformation(rule: UpdateRule) -> optax.GradientTransformation:
    return rule.transformation(
      lambda step: rule.learning_rate * multiplier(step),
      optax.add_decayed_weights(config.weight_decay, mask=decays),
      matrices,
    )

  rules = rules_in_use(config)
  parts = {name: transformation(rule) for name, rule in rules.items()}
  if len(parts) == 1:
    (tx,) = parts.values()
  else:
    tx = optax.partition(parts, lambda params: labels(config, params))
  clip = optax.identity()
  if config.clip_norm is not None:
    clip = optax.clip_by_global_norm(config.clip_norm)
  gnmr.check(config.gnmr, model)
  if config.gnmr.max_active:
    return optax.chain(gnmr.controller(config.gnmr), clip, tx)
  return optax.chain(clip, tx)


def initializer(
  config: OptimizerConfig, model: ModelConfig, sharding: Sharding = ONE_DEVICE
) -> Callable[[Any], Any]:
  """Random parameters → those that training starts from: on the sphere, where a rule
  has one. Not for trained weights."""
  matrices, rules = _matrices(model, sharding), rules_in_use(config)

  def initialize(params):
    names = labels(config, params)
    for name, rule in rules.items():
      mine = jax.tree.map(
        lambda x, n, name=name: x if n == name else optax.MaskedNode(), params, names
      )
      mine = rule.initialize(mine, matrices)
      params = jax.tree.map(
        lambda x, n, new, name=name: new if n == name else x, params, names, mine
      )
    return params

  return initialize


def _matrices(model: ModelConfig | None, sharding: Sharding) -> Matrices:
  return Matrices(params_lib.heads(model) if model else {}, sharding)


def labels(config: OptimizerConfig, params: Any) -> Any:
  """The tree of `params` with the name of the rule that updates each leaf.

  Raises:
    ValueError: a parameter that `m2jax.params` does not list.
  """
  return jax.tree.map(lambda kind: rule_of(config, kind), params_lib.kinds(params))


class Part(NamedTuple):
  """The parameters of one kind.

  Attributes:
    rule: name of what updates them.
    arrays, parameters: their number; a stacked weight is one array.
  """

  rule: str
  arrays: int
  parameters: int


def partition(config: OptimizerConfig, params: Any) -> dict[Kind, Part]:
  """How a tree of parameters, or of their shapes, is divided; raises as `labels`."""
  sizes: dict[Kind, list[int]] = {}
  kinds = jax.tree.leaves(params_lib.kinds(params))
  for kind, leaf in zip(kinds, jax.tree.leaves(params), strict=True):
    sizes.setdefault(kind, []).append(leaf.size)
  return {
    kind: Part(rule_of(config, kind), len(sizes[kind]), sum(sizes[kind]))
    for kind in sorted(sizes)
  }


def describe(config: OptimizerConfig, params: Any) -> str:
  """`partition` in one line, for the log."""
  return '; '.join(
    f'{kind} by {part.rule} ({part.arrays} arrays, {part.parameters:,} parameters)'
    for kind, part in partition(config, params).items()
  )


def measure(updates: Any, state: Any) -> dict[str, jax.Array]:
  """Metrics of a step, scalars: the RMS of the updates of each kind of parameter, and
  what the rules on a sphere and the controller report (`sso.Report`, `gnmr`)."""
  squares: dict[str, list[jax.Array]] = {}
  sizes: dict[str, int] = {}
  kinds = jax.tree.leaves(params_lib.kinds(updates))
  for kind, leaf in zip(kinds, jax.tree.leaves(updates), strict=True):
    squares.setdefault(kind, []).append(jnp.sum(jnp.square(leaf)))
    sizes[kind] = sizes.get(kind, 0) + leaf.size
  found = {
    f'update_rms/{kind}': jnp.sqrt(sum(squares[kind]) / float(sizes[kind]))
    for kind in sorted(squares)
  }
  return found | sso.metrics(state) | gnmr.metrics(state)


def learning_rates(
  config: OptimizerConfig, step: jax.typing.ArrayLike
) -> dict[str, jax.Array]:
  """Learning rates of update `step` by rule, for the log."""
  scale = schedules.multiplier(config.schedule)(step)
  rules = rules_in_use(config)
  return {name: rule.learning_rate * scale for name, rule in rules.items()}
