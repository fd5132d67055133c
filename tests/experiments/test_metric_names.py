"""What real runs write, against `observe.names`."""

from __future__ import annotations

import collections
import fnmatch
import json

import numpy as np
import pytest

from experiments import common
from m2jax.observe import metrics, names, plots
from m2jax.pool import data_pool
from m2jax.rl import rewards


def written(workdir) -> dict[str, set[str]]:
  """phase → every key of its records, superseded ones included."""
  found = collections.defaultdict(set)
  for record in metrics.read(workdir):
    found[record['phase']] |= set(record) - metrics.RESERVED
  return found


def unlisted(found: dict[str, set[str]]) -> list[str]:
  return [what for phase in found for what in names.unlisted(phase, found[phase])]


def test_other_jobs_write_listed_names(pretrained, tuned):
  """Pre-training and SFT."""
  for workdir, phases in (
    (pretrained[0], {'pretrain', 'held_out'}),
    (tuned[0], {'sft'}),
  ):
    found = written(workdir)
    assert set(found) == phases
    assert unlisted(found) == []


@pytest.mark.long
def test_the_main_job_writes_what_is_shown_and_lists_what_it_writes(forged):
  """Every name that a plot, the view or the report reads is in the records (those with
  a condition aside), every name in the records is listed, and so every plot appears."""
  found = written(forged.workdir)
  assert set(found) == {'sft', 'rl', 'eval'}
  assert unlisted(found) == []
  listed = [(phase, m) for m in names.METRICS for phase in m.phases if phase in found]
  missing = [
    (phase, m.name)
    for phase, m in listed
    if not m.when and not fnmatch.filter(found[phase], m.name)
  ]
  assert missing == []

  drawn = plots.sections(metrics.read(forged.workdir), 4, 1)
  titles = {plot.title for section in drawn for plot in section.plots}
  tables = plots.LEARNING, plots.OFF_POLICY, plots.WINDOW, plots.THROUGHPUT
  assert {'Success', *(c.title for table in tables for c in table)} <= titles
  families = {k.partition('/')[2] for k in found['rl'] if k.startswith('success/')}
  assert families and families <= titles


@pytest.mark.long
def test_advantages_of_the_report_are_those_of_the_update(forged):
  """What the learner recorded by turn is what its groups give by the run's reward."""
  settings = json.loads((forged.workdir / 'config.json').read_text('utf-8'))
  config = common.build(rewards.RewardConfig, settings['rl']['learner']['reward'])
  compared = 0
  with data_pool.DataPool(f'sqlite:///{forged.workdir}/pool.db') as pool:
    for item in pool.items('taken'):
      for credit in rewards.advantages(pool.group(item.index), config).credits:
        if not credit.completions:  # masked or pruned
          continue
        session = credit.trajectory.session
        stored = {t.turn: t.advantage for t in pool.turns(session) if not t.superseded}
        turns = [c.turn for c in credit.completions]
        np.testing.assert_array_equal([stored[t] for t in turns], credit.advantages)
        compared += len(turns)
  assert compared > 0
