"""The simulation of benchmarks.windowed_fifo obeys the scheduler's bounds."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import windowed_fifo
from benchmarks.windowed_fifo import Items, Policy, Simulation

N, P, UPDATES = 16, 4, 40
KINDS = windowed_fifo.LOG_NORMAL, windowed_fifo.BIMODAL


def run(policy, kind=windowed_fifo.LOG_NORMAL, load=1.0, seed=0):
  items = Items.draw(kind, 8 * UPDATES * P, seed, 0.7)
  step = items.latency.mean() * P / N / load
  return Simulation(items, policy, N, P, step).run(UPDATES), items


@pytest.mark.parametrize('load', [0.5, 4.0])
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('policy', windowed_fifo.policies(N, P), ids=lambda p: p.name)
def test_bounds(policy, kind, load):
  """Nothing is trained twice; ages keep the bounds of the window or of the drop."""
  found, _ = run(policy, kind, load)
  trained = [index for batch in found.batches for index in batch]
  assert len(trained) == len(set(trained)) == UPDATES * P
  assert not set(trained) & set(found.dropped)
  assert 0 <= found.idle <= found.now
  if policy.window is not None:
    assert max(found.ages_items) <= N + policy.window - 2
    assert max(found.ages) <= windowed_fifo.age_bound(N, policy.window, P)
  if policy.max_age is None:
    assert not found.dropped
  else:
    assert max(found.ages) <= policy.max_age


def test_strict_order():
  found, items = run(Policy('strict', 1))
  assert [i for batch in found.batches for i in batch] == list(range(UPDATES * P))
  measured = windowed_fifo.measure(found, items)
  assert measured['length_early'] == measured['hard_late'] == 1.0


def test_a_wider_window_waits_less():
  """And greedy the least: what it takes is the same work in another order."""
  names = 'strict', 'window 0.3', 'greedy'
  by_name = {p.name: p for p in windowed_fifo.policies(N, P)}
  idle = [run(by_name[name])[0].idle for name in names]
  assert idle[0] > idle[1] > idle[2] > 0


def test_greedy_takes_short_items_first():
  found, items = run(Policy('greedy', None))
  assert windowed_fifo.measure(found, items)['length_early'] < 1


def test_latencies():
  """The quantiles that the documentation names."""
  items = Items.draw(windowed_fifo.LOG_NORMAL, 200_000, 0, 0.7)
  median, high = np.quantile(items.latency, [0.5, 0.99])
  assert median == pytest.approx(1, rel=0.02) and high == pytest.approx(10, rel=0.05)
  slow = Items.draw(windowed_fifo.BIMODAL, 100_000, 0, 0.7).latency > 4
  assert slow.mean() == pytest.approx(0.15, abs=0.01)
