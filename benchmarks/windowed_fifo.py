"""Windowed FIFO against strict and greedy order, with and without an age limit.

  python -m benchmarks.windowed_fifo
  python -m benchmarks.windowed_fifo --json

A discrete-event simulation drives the scheduler itself, `pool.windowed_fifo`, with a
clock of its own. N items are live at once and run for their latencies; whenever P may
be taken, an idle trainer takes them and trains, and then the weights have a new
version. The unit of time is the median latency. A training step takes P / N mean
latencies / load: at load 1, N items that never wait for others would produce exactly
what the trainer consumes.

  strict        W = 1: items are trained in the order of submission
  window f      W = f N (the paper: 0.3)
  greedy        any completed item
  greedy, drop  also discards items of more than A versions, cancelled if they still
                run; A is what window 0.3 guarantees: 1 + ⌊(N + W − 2) / P⌋

  log-normal    p99 = 10 × median (facts/rl-systems.md §4.1); narrow: 2 × median
  bimodal       85 % around the median, 15 % around ten times that

The difficulty of an item correlates by ρ with the logarithm of its latency; its length
in tokens is its latency times log-normal noise of 0.3.

Columns, each the median over seeds with its range:

  idle       share of the time in which the trainer waits
  updates    per unit of time, relative to greedy of the same seed
  age        versions between submission and training: mean, and largest
  items      age in the paper's unit, items trained in between: largest; and its bound,
             N + W − 2
  dropped    share of the items that were discarded, and of the rollouts' time for them
  length     mean length of the trained items over that of the generated ones: of the
             first fifth of the updates, and of all after it. The generated ones are
             the first in order of submission, up to the number trained or dropped
  hard       the same for the share of items in the upper fifth of difficulty
  spread     standard deviation over updates of their mean difficulty, relative to that
             of updates that draw items at random: above 1, easy and hard ones come in
             clusters
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import harness
from m2jax.pool import windows
from m2jax.pool.windowed_fifo import WindowedFifo
from m2jax.pool.windows import default_window

LOG_NORMAL, NARROW, BIMODAL = 'log-normal', 'narrow log-normal', 'bimodal'
_TAIL = {LOG_NORMAL: 10.0, NARROW: 2.0}  # 99th percentile over the median
_Z99 = 2.3263478740408408  # 99th percentile of the standard normal distribution
_NOISE = 0.3  # of a length, in its logarithm
_HARD = 0.2  # share of items that count as hard


@dataclasses.dataclass(frozen=True)
class Policy:
  """A scheduling policy.

  Attributes:
    name: its name in the table.
    window: a rule (`pool.windows.make`): W, None for greedy, or a kind.
    max_age: versions after which an item is discarded; None: never.
  """

  name: str
  window: windows.Window
  max_age: int | None = None


def age_bound(capacity: int, window: int, per_step: int) -> int:
  """Largest age in versions that a window allows.

  At most N + W − 2 items are trained in between (facts/m2-and-forge.md §4.5), and an
  item that is submitted during a training step also sees the end of that one.
  """
  return 1 + (capacity + window - 2) // per_step


def policies(capacity: int, per_step: int) -> list[Policy]:
  bound = age_bound(capacity, default_window(capacity), per_step)
  some = [
    Policy(f'window {f:g}', max(1, math.floor(f * capacity))) for f in (0.1, 0.3, 0.5)
  ]
  return [
    Policy('strict', 1),
    *some,
    Policy('greedy', None),
    Policy(f'greedy, drop > {bound}', None, bound),
  ]


@dataclasses.dataclass(frozen=True)
class Items:
  """The stream of items: arrays by index.

  Attributes:
    latency: multiples of the median.
    length: tokens, in arbitrary units.
    difficulty: standard normal.
  """

  latency: np.ndarray
  length: np.ndarray
  difficulty: np.ndarray

  @classmethod
  def draw(cls, kind: str, number: int, seed: int, correlation: float) -> Items:
    rng = np.random.default_rng(seed)
    z, other, noise = rng.standard_normal((3, number))
    if kind in _TAIL:
      latency = np.exp(z * math.log(_TAIL[kind]) / _Z99)
    else:
      slow = z > np.quantile(z, 0.85)
      latency = np.where(slow, 10.0, 1.0) * np.exp(0.25 * noise)
    difficulty = correlation * z + math.sqrt(1 - correlation**2) * other
    length = latency * np.exp(_NOISE * rng.standard_normal(number))
    return cls(latency, length, difficulty)


class Simulation:
  """One run of a policy; times are in medians of the latency. See `run`.

  Attributes:
    batches: indices that each update trained.
    ages: versions between submission and training, of each trained item.
    ages_items: items trained in between.
    dropped: discarded indices.
    ended: number of items trained or dropped, after each update.
    idle, now: time that the trainer has waited, and all of it.
    worked, wasted: time that trained and discarded items ran, summed over them.
  """

  def __init__(
    self, items: Items, policy: Policy, capacity: int, per_step: int, step: float
  ):
    self._items, self._policy, self._step = items, policy, step
    self._per_step, self.now, self.idle = per_step, 0.0, 0.0
    self._fifo = WindowedFifo(capacity, policy.window, per_step)
    self._ends: list[tuple[float, int]] = []  # of running items: (time, index), a heap
    # By index: the version, the number of items trained, and the time at its beginning.
    self._begun: dict[int, tuple[int, int, float]] = {}
    self._version, self._trained = 0, 0
    self._completed: set[int] = set()
    self.batches: list[list[int]] = []
    self.ages: list[int] = []
    self.ages_items: list[int] = []
    self.dropped: list[int] = []
    self.ended: list[int] = []
    self.worked = self.wasted = 0.0

  def run(self, updates: int = 2**31, until: float = math.inf) -> Simulation:
    """Makes this number of updates, or those that begin before a time."""
    self._fill()
    while self._version < updates and self.now < until:
      if not self._fifo.wait_until_takeable(self._per_step, 0):
        before = self.now  # the trainer waits for the next end of an item
        self._complete_next()
        self.idle += self.now - before
        continue
      batch = [index for index, _ in self._fifo.take(self._per_step)]
      ends = self.now + self._step
      self._account(batch)
      self._fill()
      self.update(batch)
      while self._ends and self._ends[0][0] <= ends:
        self._complete_next()
      self.now = ends
      self._version += 1
      self._drop_old()
    return self

  def begin(self, index: int) -> None:
    """Called when an item begins to run."""

  def update(self, batch: list[int]) -> None:
    """Called when a batch is trained."""

  def _fill(self) -> None:
    while self._fifo.wait_for_room(0):
      index = self._fifo.submit()
      self._begun[index] = self._version, self._trained, self.now
      heapq.heappush(self._ends, (self.now + self._items.latency[index], index))
      self.begin(index)

  def _complete_next(self) -> None:
    self.now, index = heapq.heappop(self._ends)
    self._fifo.complete(index)
    self._completed.add(index)

  def _account(self, batch: list[int]) -> None:
    for index in batch:
      self._completed.remove(index)
      version, trained, _ = self._begun.pop(index)
      self.ages.append(self._version - version)
      self.ages_items.append(self._trained - trained)
      self._trained += 1
    self.batches.append(batch)
    self.ended.append(self._trained + len(self.dropped))
    self.worked += float(self._items.latency[batch].sum())

  def _drop_old(self) -> None:
    """Discards the items that are too old for the new version."""
    limit = self._policy.max_age
    if limit is None:
      return
    old = {i for i, begun in self._begun.items() if self._version - begun[0] > limit}
    completed = sorted(old & self._completed)
    # They are the oldest ones, which greedy takes first.
    assert [index for index, _ in self._fifo.take(len(completed))] == completed
    for index in sorted(old - self._completed):
      self._fifo.fail(index, 'too old')
    self._completed -= old
    self._ends = [pair for pair in self._ends if pair[1] not in old]
    heapq.heapify(self._ends)
    for index in sorted(old):
      begun = self._begun.pop(index)[-1]
      self.wasted += min(self.now - begun, float(self._items.latency[index]))
      self.dropped.append(index)
    self._fill()


def measure(run: Simulation, items: Items) -> dict[str, Any]:
  """The table's numbers of one run, and the two biases over ten parts of its time."""
  updates = len(run.batches)
  hard = items.difficulty > np.quantile(items.difficulty, 1 - _HARD)

  def biases(first: int, last: int) -> tuple[float, float]:
    """Length and hardness of trained over generated items, of updates [first, last)."""
    trained = np.concatenate(run.batches[first:last])
    start = run.ended[first - 1] if first else 0
    generated = slice(start, run.ended[last - 1])
    return (
      float(items.length[trained].mean() / items.length[generated].mean()),
      float(hard[trained].mean() / hard[generated].mean()),
    )

  fifth = updates // 5
  edges = np.linspace(0, updates, 11).astype(int)
  means = [items.difficulty[batch].mean() for batch in run.batches]
  expected = items.difficulty.std() / math.sqrt(len(run.batches[0]))
  early, late = biases(0, fifth), biases(fifth, updates)
  return {
    'idle': run.idle / run.now,
    'rate': updates / run.now,
    'age_mean': float(np.mean(run.ages)),
    'age_max': max(run.ages),
    'items_max': max(run.ages_items),
    'dropped': len(run.dropped) / run.ended[-1],
    'wasted': run.wasted / (run.worked + run.wasted),
    'length_early': early[0],
    'length_late': late[0],
    'hard_early': early[1],
    'hard_late': late[1],
    'spread': float(np.std(means) / expected),
    'over_time': [
      biases(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True) if b > a
    ],
  }


def simulate(kind: str, load: float, args) -> list[dict[str, Any]]:
  """Rows of a table: one for each policy, with a list of measurements by seed."""
  rows = []
  for policy in policies(args.capacity, args.per_step):
    found = []
    for seed in args.seeds:
      # Greedy with a limit may discard more than it trains.
      number = 4 * args.updates * args.per_step + args.capacity
      items = Items.draw(kind, number, seed, args.correlation)
      step = items.latency.mean() * args.per_step / args.capacity / load
      run = Simulation(items, policy, args.capacity, args.per_step, step)
      found.append(measure(run.run(args.updates), items))
    bound = None
    if isinstance(policy.window, int):
      bound = args.capacity + policy.window - 2
    rows.append({'policy': policy.name, 'bound_items': bound, 'seeds': found})
  greedy = next(row for row in rows if row['policy'] == 'greedy')
  for row in rows:
    for one, other in zip(row['seeds'], greedy['seeds'], strict=True):
      one['updates'] = one['rate'] / other['rate']
  return rows


def cell(row: Mapping[str, Any], key: str, digits: int = 2, scale: float = 1) -> str:
  """Median over seeds with its range."""
  values = [scale * one[key] for one in row['seeds']]
  low, middle, high = (f'{f(values):.{digits}f}' for f in (min, np.median, max))
  return middle if low == high else f'{middle} [{low}, {high}]'


HEAD = (
  'policy', 'idle %', 'updates', 'age', 'largest', 'items (bound)', 'dropped %',
  'length: first fifth, then', 'hard: first fifth, then', 'spread',
)  # fmt: skip
GROUPS = {
  'Throughput and age': ('idle %', 'updates', 'age', 'largest', 'items (bound)'),
  'Waste and bias': (
    'dropped %', 'length: first fifth, then', 'hard: first fifth, then', 'spread',
  ),
}  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  lines = []
  for row in rows:
    bound = '' if row['bound_items'] is None else f' ({row["bound_items"]})'
    lines.append(
      [
        row['policy'],
        cell(row, 'idle', 1, 100),
        cell(row, 'updates'),
        cell(row, 'age_mean', 1),
        cell(row, 'age_max', 0),
        cell(row, 'items_max', 0) + bound,
        f'{cell(row, "dropped", 1, 100)}, {cell(row, "wasted", 1, 100)}',
        f'{cell(row, "length_early")}, {cell(row, "length_late")}',
        f'{cell(row, "hard_early")}, {cell(row, "hard_late")}',
        cell(row, 'spread'),
      ]
    )
  return harness.markdown(HEAD, lines, GROUPS)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  parser.add_argument('--capacity', type=int, default=64, help='N, in items')
  parser.add_argument('--per_step', type=int, default=16, help='P, items of an update')
  parser.add_argument('--updates', type=int, default=400)
  parser.add_argument('--loads', type=float, nargs='+', default=[0.2, 0.5, 1.0])
  parser.add_argument('--correlation', type=float, default=0.7, help='ρ')
  parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
  parser.add_argument('--json', action='store_true')
  args = parser.parse_args()
  found = [
    {'latency': kind, 'load': load, 'rows': simulate(kind, load, args)}
    for kind in (LOG_NORMAL, BIMODAL, NARROW)
    for load in args.loads
  ]
  if args.json:
    print(json.dumps({'settings': vars(args), 'tables': found}, indent=1))
    return
  for one in found:
    print(f'{one["latency"]}, load {one["load"]:g}\n\n{table(one["rows"])}\n')
  print(
    f'N = {args.capacity}, P = {args.per_step}, {args.updates} updates, '
    f'seeds {args.seeds}'
  )


if __name__ == '__main__':
  main()
