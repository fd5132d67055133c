"""Histograms of trajectories in the metric records: rows of the table in names.py.

`trained_age/4` is the number of trained trajectories whose age is in [4, 8). Bins are
powers of two, named by their lower edge; below the first there is '0'. A record has the
bins that are not empty, for the trajectories since the previous record.
"""

from __future__ import annotations

import math

# What became of a trajectory. Those of evaluations are not counted.
KINDS = {
  'generated': 'trajectories that ended, trained or not',
  'trained': 'trajectories that the update trained',
  'dropped': 'untrained: masked, without advantage, or of failed items',
}
# Quantity: unit, meaning and lowest edge; outcomes are words, and not in bins.
QUANTITIES = {
  'age': (
    'versions',
    'from first token to update; for generated ones, to the last',
    1.0,
  ),
  'length': ('tokens', 'tokens sampled in all turns', 1.0),
  'latency': ('s', 'duration of the episode', 1 / 16),
  'outcome': ('', 'solved, partly, failed, infrastructure', None),
}
OUTCOMES = 'solved', 'partly', 'failed', 'infrastructure'


def name(kind: str, quantity: str, label: str) -> str:
  """The key of a bin in a record."""
  return f'{kind}_{quantity}/{label}'


def label(quantity: str, value: float) -> str:
  """Name of the bin that contains the value: the bin's lower edge."""
  lowest = QUANTITIES[quantity][2]
  if value < lowest:
    return '0'
  return f'{2.0 ** math.floor(math.log2(value)):g}'


def outcome(end_reason: str, success: float) -> str:
  """One of `OUTCOMES`."""
  if end_reason == 'infrastructure':
    return end_reason
  return 'solved' if success >= 1 else 'partly' if success > 0 else 'failed'


# Of each name: unit, meaning, where it is shown, and when records have it.
ROWS = {
  name(kind, quantity, '*'): (
    'trajectories',
    f'{which}; by {quantity}: {of}',
    ('plot',),
    'there are such trajectories',
  )
  for kind, which in KINDS.items()
  for quantity, (_, of, _) in QUANTITIES.items()
}
