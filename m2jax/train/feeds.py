"""Feeds rows of a forest to a train step, in micro-batches placed on the mesh.

Axes: B rows, S tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from m2jax import forest
from m2jax.forest import Forest
from m2jax.sharding import Sharding
from m2jax.train import hosts as hosts_lib
from m2jax.train.hosts import Hosts


def micro_batches(batch: Forest, rows: int) -> Iterator[Forest]:
  """Slices of `rows` rows; the last is padded with empty rows."""
  for start in range(0, len(batch.tokens), rows):
    yield forest.select(batch, slice(start, start + rows), rows=rows)


def rows(parts, config, sharding: Sharding, hosts: Hosts | None = None):
  """A feed of this host's rows; one pass has `config.micro_rows` rows of all hosts.

  Args:
    parts, config: `step.Programs` and `step.StepConfig`.
    sharding: the mesh.
    hosts: the part of a batch that this process reads; None: `hosts.find`.

  Raises:
    ValueError: micro_rows do not divide over mesh and hosts.
  """
  try:
    sharding.check_batch(config.micro_rows)
  except ValueError as error:
    raise ValueError(f'StepConfig.micro_rows={config.micro_rows}: {error}') from error
  hosts = hosts or hosts_lib.find(sharding)
  hosts.check(config.micro_rows)

  def feed(variables: Any, batch: Forest):
    sharding.check_batch(config.micro_rows, batch.tokens.shape[1])
    for part in micro_batches(batch, config.micro_rows // hosts.count):
      yield parts.micro(variables, hosts_lib.place(part, hosts, sharding))

  return feed
