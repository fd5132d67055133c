"""Which fields of a run's config a model may change, and within which bounds.

A number of a scripted rule has the rule's bounds; any other may change by `FACTOR`. A
word may become another word. What chooses code, files, addresses, commands, isolation,
the evaluation or the seed cannot be changed: a change of it would run something, reach
something, or make the evidence vanish without a cure.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from m2jax.evolve.doctor import causes, history, rules

FACTOR = 10.0
MAX_FIELDS = 1000
# Words in a part of a name, such as `roles.engine_urls`, `tasks.kind` or `seed`.
DENIED = frozenset(
  'address addresses allow api argv author backend bytes class classes command '
  'commands connections cwd dev dir directory dirs env environment eval exec file '
  'executable '
  'files held host hosts image images import init interpreter key keys kind limits log '
  'mesh module mount name network password path paths pool port ports program proxy '
  'recorded repository root sandbox script secret seed server setup shell suffixes '
  'unknown url urls user workdir'.split()
)
# Whole parts. Those of a budget end a run before its window.
DENIED_PARTS = {'max_items', 'patience', 'seconds', 'split', 'start', 'tokenizer'}
_LONGER = 'steps'  # a budget that may only grow
_NAME = re.compile(r'[A-Za-z]\w{0,63}')
_WORD = re.compile(r'[A-Za-z]\w{0,31}')


@dataclasses.dataclass(frozen=True)
class Field:
  """A field that may be changed.

  Attributes:
    value: the run's.
    low, high: bounds of a number; None for a truth value or a word.
  """

  value: Any
  low: float | None = None
  high: float | None = None

  def check(self, new: Any) -> Any:
    """The new value, in the field's type.

    Raises:
      ValueError: it is of another type, out of bounds, or the old one.
    """
    old = self.value
    if type(old) is float and type(new) is int and abs(new) < 2**53:
      new = float(new)
    if type(new) is not type(old):
      kind = {bool: 'true or false', int: 'a whole number', float: 'a number'}
      raise ValueError(f'{new!r:.80}: must be {kind.get(type(old), "a word")}')
    if new == old:
      raise ValueError(f'{new!r:.80}: the run has this value already')
    if self.low is not None and not self.low <= new <= self.high:
      raise ValueError(f'{new!r:.80}: must be from {self.low:g} to {self.high:g}')
    if type(new) is str and not _WORD.fullmatch(new):
      raise ValueError(f'{new!r:.80}: must be a word')
    return new


def denied(name: str) -> bool:
  """Whether a dotted name has a part that may not be changed."""
  parts = name.split('.')
  known = all(map(_NAME.fullmatch, parts))
  words = {word for part in parts for word in part.lower().split('_')}
  return not known or bool(words & DENIED or DENIED_PARTS & set(parts))


def fields(config: Mapping[str, Any]) -> dict[str, Field]:
  """The fields of a config.json that may be changed, at most `MAX_FIELDS`."""
  ruled = _ruled(config)
  found = {}
  for name, value in _leaves(config):
    if len(found) == MAX_FIELDS or denied(name):
      continue
    if type(value) is bool:
      found[name] = Field(value)
    elif type(value) in (int, float) and math.isfinite(value):
      low, high = ruled.get(name) or _around(value)
      if name.rpartition('.')[2] == _LONGER:
        low = value
      found[name] = Field(value, low, high)
    elif type(value) is str and _WORD.fullmatch(value):
      found[name] = Field(value)
  return found


def _leaves(config: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
  for key, value in config.items():
    if isinstance(value, dict):
      yield from _leaves(value, f'{prefix}{key}.')
    else:
      yield f'{prefix}{key}', value


def _ruled(config: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
  """Bounds of the fields of `rules.RULES`, the widest if several rules have one."""
  found: dict[str, tuple[float, float]] = {}
  for rule in (rule for of_kind in rules.RULES.values() for rule in of_kind):
    for phase in history.SERIES_PHASES:
      if name := causes.field_of(rule.field, phase, config):
        low, high = found.get(name, (rule.low, rule.high))
        found[name] = min(low, rule.low), max(high, rule.high)
  return found


def _around(value: float) -> tuple[float, float]:
  """The same sign, within `FACTOR`; around zero up to one."""
  if not value:
    return 0.0, 1.0
  ends = sorted((value / FACTOR, value * FACTOR))
  return ends[0], ends[1]
