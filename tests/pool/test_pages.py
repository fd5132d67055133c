"""What the trajectory page asks of the pool has the same answers on both databases."""

from __future__ import annotations

from m2jax.pool import database
from m2jax.pool.pages import Condition, PageReader
from tests.viewer import example

ITEMS = 6


def test_rewards_and_tasks(url, tmp_path):
  """Bars count every judged return once; a task has its trajectories and their mean."""
  example.write(tmp_path, items=ITEMS, url=url)
  opened = database.open_read_only(url)
  try:
    pages = PageReader(opened)
    found = pages.histogram(Condition('rl'))
    assert len(found['counts']) == len(found['edges']) - 1
    returns = [row for item in range(ITEMS) for row in pages.sessions(item)]
    assert 0 < sum(found['counts']) <= len(returns)
    low, high = found['edges'][0], found['edges'][-1]
    inside = Condition('rl', least_reward=low, most_reward=high)
    assert pages.histogram(inside) == found
    tasks = pages.tasks(Condition('rl'))
    items = [int(task[0].rpartition('/')[2]) for task in tasks]
    assert items == sorted(items, reverse=True)  # the newest first
    for item, (task, family, count, mean) in zip(items, tasks, strict=True):
      ranks = range(len(pages.sessions(item)))
      verdicts = [float(example.succeeds(item, rank)) for rank in ranks]
      assert family == example.FAMILIES[item % 3] and count == len(verdicts)
      assert mean == sum(verdicts) / len(verdicts)
      sessions = pages.of_task(Condition('rl'), task, 2)
      assert set(sessions) <= set(pages.sessions(item)) and len(sessions) <= 2
  finally:
    opened.close()
