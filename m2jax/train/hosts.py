"""Rows of a batch over the hosts of a run: each host reads and packs only its own.

A mesh splits the rows of a batch into shards, and each process has some of them.
Processes that have a shard in common (tokens or channels are split over them) are one
host: they read the same rows. If there are more hosts than data streams, a host also
reads the rows of its neighbours (`find`).

A step takes the rows of this host. A micro-batch is the concatenation of the hosts'
parts, and weights are summed on the devices, so that no host waits for another.

Axes: B rows of a whole batch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from m2jax import forest
from m2jax import sharding as sharding_lib
from m2jax.forest import Forest
from m2jax.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Hosts:
  """The part of every batch that this process reads.

  Attributes:
    index, count: (h, H): the h-th of H equal parts of the rows.
    shards: this host's row shards.
  """

  index: int = 0
  count: int = 1
  shards: tuple[int, ...] = (0,)

  def check(self, rows: int) -> None:
    """Raises ValueError unless `rows` rows divide over the hosts."""
    if rows % self.count:
      raise ValueError(f'{rows} rows of a batch do not divide over {self.count} hosts')


def find(sharding: Sharding, streams: int = 0) -> Hosts:
  """This process's part of the rows of a batch on a mesh.

  Args:
    sharding: the mesh.
    streams: number of data streams. Hosts share a part of the rows until the number of
      parts divides it; 0 is no limit.
  """
  if sharding.mesh is None:
    return Hosts()
  total = sharding.size('rows')
  where = NamedSharding(sharding.mesh, sharding.rules.spec('batch', 'rows'))
  held: dict[int, set[int]] = {}
  for device, (rows,) in where.devices_indices_map((total,)).items():
    held.setdefault(device.process_index, set()).update(range(*rows.indices(total)))
  parts = sorted(map(sorted, _joined(held.values())))
  if len({len(part) for part in parts}) > 1:
    return Hosts(shards=tuple(range(total)))  # unequal: each reads the whole batch
  count = math.gcd(len(parts), streams)
  groups = np.reshape(np.array(parts), (count, -1))
  mine = min(held[jax.process_index()])
  index = next(i for i, group in enumerate(groups) if mine in group)
  return Hosts(index, count, tuple(sorted(map(int, groups[index]))))


def _joined(sets: Iterable[set[int]]) -> list[set[int]]:
  """The sets, those with a common element as one."""
  joined: list[set[int]] = []
  for found in sets:
    touching = [other for other in joined if other & found]
    joined = [other for other in joined if not other & found]
    joined.append(found.union(*touching))
  return joined


def part(batch: Forest, micro_rows: int, index: int, count: int) -> Forest:
  """The rows of one host, of a batch that every process has packed alike.

  The hosts' rows side by side are the micro-batches of one host, so that the sums of a
  step have the same terms.

  Args:
    batch: host arrays.
    micro_rows: rows of a micro-batch of all hosts, which `count` divides.
    index, count: as in `Hosts`.
  """
  if count == 1:
    return batch
  passes = -(-len(batch.tokens) // micro_rows)
  whole = forest.select(batch, slice(None), rows=passes * micro_rows)
  rows = np.arange(passes * micro_rows).reshape(passes, count, -1)
  return forest.select(whole, rows[:, index].ravel().tolist())


def place(local: Forest, hosts: Hosts, sharding: Sharding) -> Forest:
  """The batch of all hosts on the mesh, from this host's rows."""
  if sharding.mesh is None:
    return local

  def one(spec, leaf):
    rows = len(leaf) * hosts.count
    a_shard = rows // sharding.size('rows')
    at = {shard: number * a_shard for number, shard in enumerate(hosts.shards)}

    def read(index):
      start = at[(index[0].start or 0) // a_shard]
      return leaf[(slice(start, start + a_shard), *index[1:])]

    where = NamedSharding(sharding.mesh, spec)
    return jax.make_array_from_callback((rows, *leaf.shape[1:]), where, read)

  specs = sharding_lib.batch_specs(sharding.rules)
  placed = {}
  for field in dataclasses.fields(Forest):
    leaf = getattr(local, field.name)
    placed[field.name] = leaf
    if leaf is not None:
      placed[field.name] = one(getattr(specs, field.name), np.asarray(leaf))
  return Forest(**placed)


def own(whole: np.ndarray, hosts: Hosts, sharding: Sharding) -> np.ndarray:
  """This host's rows of an array over the rows of all hosts, as `place` was given."""
  shards = whole.reshape(sharding.size('rows'), -1, *whole.shape[1:])
  return shards[list(hosts.shards)].reshape(-1, *whole.shape[1:])


def gather(state: Mapping[str, Any]) -> list[dict[str, Any]]:
  """The JSON-able dict of each process, on all of them; every process must call it."""
  if jax.process_count() == 1:
    return [dict(state)]
  data = np.frombuffer(json.dumps(state).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.int32(len(data)))
  padded = np.zeros(int(sizes.max()), np.uint8)
  padded[: len(data)] = data
  rows = multihost_utils.process_allgather(padded)
  return [json.loads(bytes(r[:n])) for r, n in zip(rows, sizes.ravel(), strict=True)]
