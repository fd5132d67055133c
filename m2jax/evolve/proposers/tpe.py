"""TPE (J. Bergstra et al., NeurIPS 2011) over the operators' fields, with optuna.

The study is made anew each round from the scores so far, so that there is no state. A
suggestion is a point of the whole space: it differs from its parent wherever TPE says.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from m2jax.checks import InvalidSetting, require
from m2jax.evolve import operators, proposers


@dataclasses.dataclass(frozen=True)
class Config(proposers.ProposerConfig):
  """Settings of the sampler.

  Attributes:
    startup: candidates that are drawn at random before the estimator is used.
  """

  kind: str = 'tpe'
  startup: int = 10

  def __post_init__(self):
    require(self, self.startup >= 1, 'startup', 'at least 1')


class Tpe:
  """See the module."""

  def __init__(self, config: Config):
    """Raises InvalidSetting without optuna."""
    try:
      import optuna
    except ModuleNotFoundError as error:
      raise InvalidSetting(
        "proposer.kind='tpe' needs optuna: pip install 'm2jax[evolve]'"
      ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    self._optuna, self._startup = optuna, config.startup

  def propose(self, view: proposers.View) -> proposers.Proposal:
    optuna = self._optuna
    sampler = optuna.samplers.TPESampler(
      seed=view.seed % 2**32, n_startup_trials=self._startup
    )
    study = optuna.create_study(direction='maximize', sampler=sampler)
    space, back = self._space(view)
    for attempt in view.attempts:
      if attempt.values is None or attempt.score is None:
        continue
      params = {f: self._encoded(d, attempt.values[f]) for f, d in space.items()}
      if all(_inside(d, params[f]) for f, d in space.items()):
        study.add_trial(
          optuna.trial.create_trial(
            params=params, distributions=space, value=attempt.score
          )
        )
    asked = study.ask(space).params
    current = view.parent.values
    drawn = {f: back.get(f, {}).get(value, value) for f, value in asked.items()}
    changes = {f: value for f, value in drawn.items() if value != current[f]}
    return proposers.Proposal(changes, f'TPE after {len(study.trials) - 1} scores')

  def _space(self, view: proposers.View) -> tuple[dict, dict]:
    """Field → distribution; field → text of a category → value."""
    found = self._optuna.distributions
    space, back = {}, {}
    start = view.attempts[0].values
    for operator in operators.OPERATORS:
      field = operator.field
      if isinstance(operator, operators.Options):
        values = operators.allowed(operator, view.bounds)
        texts = {_text(v): v for v in (*values, start[field])}
        space[field] = found.CategoricalDistribution(list(texts))
        back[field] = texts
        continue
      low, high = operators.limits(operator, view.bounds)
      low, high = min(low, start[field]), max(high, start[field])
      if operator.whole:
        space[field] = found.IntDistribution(int(low), int(high))
      else:
        space[field] = found.FloatDistribution(float(low), float(high))
    return space, back

  def _encoded(self, distribution: Any, value: Any) -> Any:
    found = self._optuna.distributions
    if isinstance(distribution, found.CategoricalDistribution):
      return _text(value)
    return value if isinstance(distribution, found.IntDistribution) else float(value)


def _inside(distribution: Any, value: Any) -> bool:
  choices = getattr(distribution, 'choices', None)
  if choices is not None:
    return value in choices
  return distribution.low <= value <= distribution.high


def _text(value: Any) -> str:
  return json.dumps(value, sort_keys=True)


make = Tpe
